"""The progress section of the gang's page: stragglers, a bar, speeds, a chart of each of rank 0's values. Pure.

Its input is the stored result of `keep.ProgressKeeper.record`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...elements.charts import COLOURS, frame, restart_marks, time_axis, time_unit
from ...elements.model import Bar, Chart, Facts, Part, Sentence
from ...records.on_page import OnPage
from ...records.summary import Summary
from .said import number, percent, speed, step
from .stragglers import speed_text

_NO_METRICS = (
    "No metrics: a script reports them with metaflow_torchrun.report(step=..., total=..., loss=...). "
    "help(metaflow_torchrun.report) explains it."
)
_IS = re.compile(r"\bis\b")
_HEIGHT = 130
_DECADES = 100.0  # if the values span more, the scale is logarithmic
# Vega computes differences and powers of ten of values. Beyond these limits the results are not finite.
_LARGEST, _SMALLEST = 1e300, 1e-300


class ProgressOnPage(OnPage):
    """The progress of the last launch that has reported any."""

    after = "outcome"
    together = MappingProxyType(
        {
            "progress": "first report read of rank 0: {text}",
            "straggler": "{ranks}: slower than half the median for a minute",
            "recovered": "{ranks}: no longer slow",
        }
    )

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return the progress section, if the scripts report any."""
        if not kept:
            return (Sentence(_NO_METRICS),) if summary.has_started else ()
        # In development versions of 0.3.0, other nodes than the control node kept only speeds.
        if "series" not in kept:
            return ()
        if _is_of_last(kept, summary):
            return progress_parts(kept, summary)
        before = Sentence(
            f"Launch {summary.launch} has reported nothing so far. This is what launch {kept['launch']} reported."
        )
        return (before, *progress_parts({**kept, "rates": None}, summary))

    def marks(self, kept: Any, summary: Summary) -> Mapping[int, str]:
        """Return the speeds of slow ranks; a launch that has ended keeps the last ones."""
        rates = ((kept or {}).get("rates") or {}) if _is_of_last(kept, summary) else {}
        slow = {each["rank"]: f"slow: {speed_text(each['speed'], rates['by'])}" for each in rates.get("stragglers", ())}
        return slow if _verb(summary) else {}


def _is_of_last(kept: Any, summary: Summary) -> bool:
    """Return whether the last launch has reported anything; the record may be of an earlier one."""
    return bool(kept) and kept.get("launch", summary.launch) == summary.launch


def progress_parts(progress: Mapping[str, Any], summary: Summary) -> list[Part]:
    """Return the parts of the section: warnings, bar, facts, charts."""
    is_running = summary.outcome == "running"
    rows = (
        ("rank 0", step(progress)),
        ("speed", ", ".join(speed(progress)[: None if is_running else 1])),
        ("all ranks", _rates(progress["rates"], summary)),
        ("last values", ", ".join(f"{key} {number(value)}" for key, value in progress["last"].items())),
    )
    slow = _stragglers(progress["rates"], summary)
    bar = [] if progress["total"] is None else [Bar(percent(progress), summary.outcome)]
    charts = [
        _chart(key, points, progress["last"].get(key)) for key, points in progress["series"].items() if len(points) > 1
    ]
    # Older versions have stored no speeds.
    speeds = [(at_s, _drawn(value)) for at_s, value in progress.get("speeds", ())]
    if sum(value is not None for _, value in speeds) > 1:
        charts.append(_speed_chart(speeds, summary))
    return [*(Sentence(line, "warning") for line in slow), *bar, Facts(rows), *charts]


# --- in words -------------------------------------------------------------------------------------


def _rates(rates: Mapping[str, Any] | None, summary: Summary) -> str:
    """Return the speeds of all ranks; empty if only one rank reports its steps."""
    if rates is None or rates["ranks"] < 2:
        return ""
    slowest, by = rates["slowest"], rates["by"]
    node = "" if summary.is_alone else f" (node {slowest['node']})"
    return (
        f"median of {rates['ranks']} ranks: {speed_text(rates['median'], by)}; slowest: rank {slowest['rank']}{node}, "
        f"{speed_text(slowest['speed'], by)}"
    )


def _stragglers(rates: Mapping[str, Any] | None, summary: Summary) -> list[str]:
    """Return a sentence for each rank that is much slower than the others, or was when the launch ended."""
    verb = _verb(summary)
    hosts = {node.index: f"host {node.host}" for node in summary.nodes}
    places = hosts if summary.is_alone else {node: f"node {node}, {host}" for node, host in hosts.items()}
    slow = (rates or {}).get("stragglers", ()) if verb else ()
    return [
        f"rank {each['rank']} ({places.get(each['node'], 'unknown')}) " + _IS.sub(verb, each["text"]) for each in slow
    ]


def _verb(summary: Summary) -> str:
    """Return the tense in which to tell of slow ranks; empty while workers start again, with new speeds."""
    return {"running": "is", "stopping": "is", "done": "was", "failed": "was"}.get(summary.outcome, "")


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


def _speed_chart(speeds: list[tuple[float, float | None]], summary: Summary) -> Chart:
    """Return rank 0's speed over the time of the gang, with the restarts."""
    unit_s, _ = time_unit(summary.seconds)
    rows = [{"at": round(at_s / unit_s, 3), "value": value} for at_s, value in speeds]
    layer = {
        "data": {"values": rows},
        "mark": {"type": "line", "color": COLOURS["running"]},
        "encoding": {
            "x": {"field": "at", **time_axis(summary.seconds, {"tickCount": 5})},
            "y": {"field": "value", "type": "quantitative", "axis": {"title": None, "tickCount": 4}},
            "tooltip": [{"field": "at"}, {"field": "value"}],
        },
    }
    marks = restart_marks(summary.restarts_s, summary.seconds)
    return Chart({**frame("speed: steps/s", _HEIGHT), "layer": [layer, *marks]})


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


PART = ProgressOnPage()
