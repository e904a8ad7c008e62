"""How far the launch is, on the gang's page: stragglers, a bar, speeds, a chart of each of rank 0's values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...records.summary import Summary
from ...show.parts.charts import COLOURS, frame
from ...show.parts.model import Bar, Chart, Facts, Part, Sentence
from . import words

_HEIGHT = 130
_POINTS = 200  # of a chart
# Vega counts with differences of values, and with powers of ten: of larger and of smaller ones these are no numbers.
_LARGEST, _SMALLEST = 1e300, 1e-300


def progress_parts(progress: Mapping[str, Any], summary: Summary) -> list[Part]:
    """Return how far a launch is; of a node that is not the control node, how far its own ranks are."""
    if "paces" in progress:
        return [_of_ranks(progress["paces"])]
    is_running = summary.outcome == "running"
    hosts = {node.index: node.host for node in summary.nodes}
    slow = words.stragglers(progress, hosts) if is_running else []
    left = words.left(progress) if is_running else ""
    last = ", ".join(f"{key} {words.number(value)}" for key, value in progress["last"].items())
    rows = (
        ("rank 0", words.step(progress)),
        ("speed", ", ".join(filter(None, [words.speed(progress), left]))),
        ("all ranks", words.rates(progress)),
        ("last values", last),
    )
    bar = [] if progress["total"] is None else [Bar(words.percent(progress))]
    charts = (_chart(key, points, progress["last"].get(key)) for key, points in progress["series"].items())
    return [*(Sentence(line, "warning") for line in slow), *bar, Facts(rows), *charts]


def _of_ranks(paces: Mapping[str, Mapping[str, Any]]) -> Facts:
    told = ((rank, f"step {pace['step']}", words.speed(pace)) for rank, pace in paces.items())
    return Facts(tuple((f"rank {rank}", ", ".join(filter(None, said))) for rank, *said in told))


def _chart(key: str, points: list[tuple[int, float | None]], last: float | None) -> Chart:
    every = 1 + len(points) // _POINTS
    shown = [(step, _drawn(value)) for step, value in [*points[:-1:every], *points[-1:]]]
    steps = {"title": None, "tickCount": 5}
    scale = _scale({value for _, value in shown if value is not None})
    spec = {
        **frame(f"{key}: {words.number(last)}", _HEIGHT),
        "data": {"values": [{"step": step, "value": value} for step, value in shown]},
        "mark": {"type": "line", "color": COLOURS["starting"], "point": len(shown) < 3},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "axis": steps, "scale": {"zero": False}},
            "y": {"field": "value", "type": "quantitative", "axis": {"title": None, "tickCount": 4}, "scale": scale},
            "tooltip": [{"field": "step"}, {"field": "value"}],
        },
    }
    return Chart(spec)


def _drawn(value: float | None) -> float | None:
    """Return what the chart has for a value; of one that stands for "none yet", as the largest there is, a gap."""
    if value is None or not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= _SMALLEST else 0.0


def _scale(values: set[float]) -> dict[str, Any]:
    """Return how high the chart is; by itself Vega gives a value that never changes an axis with a rounded one."""
    value = min(values, default=0.0)
    return {"domain": sorted((value / 2, value * 1.5))} if len(values) == 1 and value else {"zero": False}
