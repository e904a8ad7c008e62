"""How far the launch is, as components: stragglers first, a progress bar, a chart for each of rank 0's values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..records.summary import Summary
from ..views import progress as words
from .drawing import facts, told
from .style import COLOURS
from .timeline import frame

_HEIGHT = 130
_POINTS = 200  # of a chart
_COLUMNS = 2
# Vega counts with differences of values, and with powers of ten: of larger and of smaller ones these are no numbers.
_LARGEST, _SMALLEST = 1e300, 1e-300


def components(summary: Summary, progress: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the contents of the section."""
    charts = [_chart(key, points, progress["last"].get(key)) for key, points in progress["series"].items()]
    found = [_markdown(_slow(summary, progress) + _bar(progress) + _told(summary, progress))]
    if charts:
        found.append({"type": "section", "columns": min(_COLUMNS, len(charts)), "contents": charts})
    return found


def of_ranks(paces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far each rank of one node is, as one component; `paces` is what ``features/progress`` keeps of it."""
    told_last = ((rank, f"step {pace['step']}", words.speed(pace)) for rank, pace in paces.items())
    return _markdown(facts((f"rank {rank}", ", ".join(filter(None, said))) for rank, *said in told_last))


def _markdown(html: str) -> dict[str, Any]:
    return {"type": "markdown", "source": f'<div class="tr tr-progress">{html}</div>'}


def _slow(summary: Summary, progress: Mapping[str, Any]) -> str:
    if summary.outcome != "running":
        return ""
    hosts = {node.index: node.host for node in summary.nodes}
    return "".join(f'<div class="tr-slow">{told(line)}</div>' for line in words.stragglers(progress, hosts))


def _told(summary: Summary, progress: Mapping[str, Any]) -> str:
    left = words.left(progress) if summary.outcome == "running" else ""
    speed = ", ".join(filter(None, [words.speed(progress), left]))
    return facts([("rank 0", words.step(progress)), ("speed", speed), ("all ranks", words.rates(progress))])


def _bar(progress: Mapping[str, Any]) -> str:
    # Metaflow's component can't be read in the dark: its colours are fixed (2.19).
    if progress["total"] is None:
        return ""
    done = words.percent(progress)
    return f'<progress class="tr-bar" max="100" value="{done}">{done} %</progress>'


def _chart(key: str, points: list[tuple[int, float | None]], last: float | None) -> dict[str, Any]:
    every = 1 + len(points) // _POINTS
    shown = [(step, _drawn(value)) for step, value in [*points[:-1:every], *points[-1:]]]
    spec = {
        **frame(),
        "title": {"text": f"{key}: {words.number(last)}", "anchor": "start", "fontSize": 12, "limit": 400},
        "height": _HEIGHT,
        "data": {"values": [{"step": step, "value": value} for step, value in shown]},
        "mark": {"type": "line", "color": COLOURS["starting"], "point": len(shown) < 3},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "axis": {"title": None, "tickCount": 5},
                "scale": {"zero": False},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "axis": {"title": None, "tickCount": 4},
                "scale": _scale({value for _, value in shown if value is not None}),
            },
            "tooltip": [{"field": "step"}, {"field": "value"}],
        },
    }
    return {"type": "vegaChart", "spec": spec, "options": {"actions": False}}


def _drawn(value: float | None) -> float | None:
    """Return what the chart has for a value; of one that stands for "none yet", as the largest there is, a gap."""
    if value is None or not abs(value) <= _LARGEST:
        return None
    return value if abs(value) >= _SMALLEST else 0.0


def _scale(values: set[float]) -> dict[str, Any]:
    """Return how high the chart is; by itself Vega gives a value that never changes an axis with a rounded one."""
    value = min(values, default=0.0)
    return {"domain": sorted((value / 2, value * 1.5))} if len(values) == 1 and value else {"zero": False}
