"""The progress section of the gang's page: a bar, the speed, a chart of each of rank 0's values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..elements.charts import COLOURS, frame
from ..elements.model import Bar, Chart, Facts, Part, Sentence
from ..gang.progress import number, percent, speed, speed_text, step
from ..gang.view import GangView

_NO_METRICS_S = 60.0  # a script that reports something may need so long until its first step
_NO_METRICS = (
    "No metrics: a script reports them with metaflow_torchrun.report(step=..., total=..., loss=...). "
    "help(metaflow_torchrun.report) explains it."
)
_HEIGHT = 130
_DECADES = 100.0  # if the values span more, the scale is logarithmic
# Vega computes differences and powers of ten of values. Beyond these limits the results are not finite.
_LARGEST, _SMALLEST = 1e300, 1e-300


def parts(view: GangView) -> list[Part]:
    """Return the parts of the section: bar, facts, charts; or that the scripts report nothing."""
    progress = view.progress
    if progress is None:
        return [Sentence(_NO_METRICS)] if (view.trained_s or 0.0) > _NO_METRICS_S else []
    if progress["launch"] != view.launch:
        text = f"Launch {view.launch} has reported nothing so far. This is what launch {progress['launch']} reported."
        return [Sentence(text), *_shown({**progress, "rates": None}, view)]
    return _shown(progress, view)


def _shown(progress: Mapping[str, Any], view: GangView) -> list[Part]:
    is_running = view.outcome == "running"
    rows = (
        ("rank 0", step(progress)),
        ("speed", ", ".join(speed(progress)[: None if is_running else 1])),
        ("all ranks", _rates(progress["rates"])),
        ("last values", ", ".join(f"{key} {number(value)}" for key, value in progress["last"].items())),
    )
    bar = [] if progress["total"] is None else [Bar(percent(progress), view.outcome)]
    charts = [
        _chart(key, points, progress["last"].get(key)) for key, points in progress["series"].items() if len(points) > 1
    ]
    return [*bar, Facts(rows), *charts]


# --- in words -------------------------------------------------------------------------------------


def _rates(rates: Mapping[str, Any] | None) -> str:
    """Return the speeds of all ranks; empty if only one rank reports its steps."""
    if rates is None or rates["ranks"] < 2:
        return ""
    slowest, by = rates["slowest"], rates["by"]
    median = f"median of {rates['ranks']} ranks: {speed_text(rates['median'], by)}"
    return f"{median}; slowest: rank {slowest['rank']}, {speed_text(slowest['speed'], by)}"


# --- a chart --------------------------------------------------------------------------------------


def _chart(key: str, points: list[tuple[int, float | None]], last: float | None) -> Chart:
    shown = [(step, _drawn(value)) for step, value in points]
    steps = {"title": "step", "tickCount": 5, "tickMinStep": 1}
    scale = _scale({value for _, value in shown if value is not None})
    spec = {
        **frame(f"{key}: {number(last)}", _HEIGHT),
        "data": {"values": [{"step": step, "value": value} for step, value in shown]},
        "mark": {"type": "line", "color": COLOURS["running"]},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "axis": steps, "scale": {"zero": False}},
            "y": {"field": "value", "type": "quantitative", "axis": {"title": None, "tickCount": 4}, "scale": scale},
            "tooltip": [{"field": "step"}, {"field": "value"}],
        },
    }
    return Chart(spec)


def _drawn(value: float | None) -> float | None:
    """Return the value for the chart; None, a gap, for huge values, which scripts use for "none yet"."""
    if value is None or not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= _SMALLEST else 0.0


def _scale(values: set[float]) -> dict[str, Any]:
    """Return the scale of the values. Vega's own axis for a constant shows a rounded number."""
    value = min(values, default=0.0)
    if value > 0 and max(values) / value > _DECADES:
        return {"type": "log"}
    return {"domain": sorted((value / 2, value * 1.5))} if len(values) == 1 and value else {"zero": False}
