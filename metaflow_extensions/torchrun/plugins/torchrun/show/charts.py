"""The charts of a gang's page as Vega-Lite, with colours for light and dark. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..gang.progress import number
from ..gang.view import GangView
from .parts import Chart

# States of nodes and ranks, in the usual order. The colours can be distinguished on white and on black.
COLOURS = {
    "not joined yet": "#c3c9d1",
    "step code": "#9c8fc4",
    "waiting": "#d0b25c",
    "preparing": "#0e9bb5",
    "starting": "#7aa7e8",
    "running": "#2563eb",
    "stopping": "#f59e0b",
    "restarting": "#a855f7",
    "stopped": "#6b7a90",
    "done": "#22a35a",
    "storing": "#22a35a",
    "failed": "#dc3545",
    "lost": "#e0457b",
}

# The unit of a time axis, by its least length in seconds.
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_GREY, _FAINT = "#808893", "rgba(128, 136, 147, 0.25)"  # readable on white and on black
_NARROWEST = 1 / 2000  # a state that took less of the time is less than a pixel wide, and needs no legend
_FULL_STEP, _HEIGHT, _MIN_STEP = 24, 420, 2  # of a node's line in the chart of all times
_SERIES_HEIGHT = 130
_DECADES = 100.0  # if the values span more, the scale is logarithmic
# Vega computes differences and powers of ten of values. Beyond these limits the results are not finite.
_LARGEST, _SMALLEST = 1e300, 1e-300


def chart_of_times(view: GangView) -> Chart:
    """Return the chart of all times: a line for each node, a colour for each state."""
    end_s, count = view.seconds, len(view.nodes)
    unit_s, unit = next((unit_s, unit) for least_s, unit_s, unit in _UNITS if end_s >= least_s)
    rows = [
        {
            "node": index,
            "host": node.host,
            "state": state,
            "from": round(begin_s / unit_s, 3),
            "to": round(min(until_s, end_s) / unit_s, 3),
        }
        for index, node in enumerate(view.nodes)
        for (state, begin_s), until_s in zip(node.since, [*(at for _, at in node.since[1:]), end_s], strict=True)
        if state not in ("finished", "failed") and min(until_s, end_s) - begin_s >= end_s * _NARROWEST
    ]
    colours = {state: colour for state, colour in COLOURS.items() if any(row["state"] == state for row in rows)}
    step = max(_MIN_STEP, min(_FULL_STEP, _HEIGHT // max(1, count)))
    nodes = {"domain": [*range(count)], "padding": 0}
    times = {"domain": [0, round(max(end_s, 1.0) / unit_s, 3)], "nice": False}
    states = {"domain": list(colours), "range": list(colours.values())}
    node_axis = {"title": "node", "labelOverlap": True, "ticks": False, "domain": False}
    time_axis = {"title": f"{unit} since the start", "tickCount": 6}
    legend = {"orient": "top", "title": None, "columns": 4}
    spec = {
        **_frame({"step": step}),
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.8 if step > 8 else 1.0}},
        "encoding": {
            "y": {"field": "node", "type": "ordinal", "scale": nodes, "axis": node_axis},
            "x": {"field": "from", "type": "quantitative", "axis": time_axis, "scale": times},
            "x2": {"field": "to"},
            "color": {"field": "state", "type": "nominal", "scale": states, "legend": legend},
            "tooltip": [{"field": name} for name in ("node", "host", "state", "from", "to")],
        },
    }
    return Chart(spec)


def chart_of_values(name: str, points: Sequence[tuple[int, float | None]], last: float | None) -> Chart:
    """Return the chart of a value over steps, with its last value in the title; None is a gap."""
    shown = [(step, _drawn(value)) for step, value in points]
    steps = {"title": "step", "tickCount": 5, "tickMinStep": 1}
    scale = _scale({value for _, value in shown if value is not None})
    title = {"text": f"{name}: {number(last)}", "anchor": "start", "fontSize": 12, "fontWeight": "bold", "limit": 400}
    spec = {
        **_frame(_SERIES_HEIGHT),
        "title": title,
        "data": {"values": [{"step": step, "value": value} for step, value in shown]},
        "mark": {"type": "line", "color": COLOURS["running"]},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "axis": steps, "scale": {"zero": False}},
            "y": {"field": "value", "type": "quantitative", "axis": {"title": None, "tickCount": 4}, "scale": scale},
            "tooltip": [{"field": "step"}, {"field": "value"}],
        },
    }
    return Chart(spec)


def _frame(height: Any) -> dict[str, Any]:
    """Return a chart without data, as wide as the page, with texts that are readable on it."""
    text = {"labelColor": _GREY, "titleColor": _GREY}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": "container",
        "height": height,
        "background": None,
        "config": {
            "axis": {**text, "gridColor": _FAINT, "domainColor": _FAINT, "tickColor": _FAINT},
            "legend": text,
            "title": {"color": _GREY},
            "view": {"stroke": None},
        },
    }


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
