"""The times of every node as one chart, for Metaflow's `VegaChart`. Pure."""

from __future__ import annotations

from typing import Any

from ..records.summary import Summary
from .style import COLOURS

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_FULL_STEP, _HEIGHT, _MIN_STEP = 24, 420, 2
_GREY, _FAINT = "#808893", "rgba(128, 136, 147, 0.25)"  # to be read on white and on black


def frame() -> dict[str, Any]:
    """Return what all charts of the page have in common: their width is the page's, their texts can be read on it."""
    text = {"labelColor": _GREY, "titleColor": _GREY}
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "background": None,
        "config": {
            "axis": {**text, "gridColor": _FAINT, "domainColor": _FAINT, "tickColor": _FAINT},
            "legend": text,
            "title": {"color": _GREY},
            "view": {"stroke": None},
        },
    }


def chart(name: str, summary: Summary) -> dict[str, Any]:
    """Return the chart: a line for each node, a colour for each state."""
    rows = [
        {
            "node": node.index,
            "host": node.host,
            "state": span.state,
            "from": round(span.begin_s, 1),
            "to": round(span.end_s, 1),
        }
        for node in summary.nodes
        for span in node.spans
        if span.state != "left"
    ]
    states = [state for state in COLOURS if any(row["state"] == state for row in rows)]
    return {
        "type": "vegaChart",
        "id": name,
        "spec": _spec(rows, states, [node.index for node in summary.nodes]),
        "options": {"actions": False},
    }


def _spec(rows: list[dict[str, Any]], states: list[str], nodes: list[int]) -> dict[str, Any]:
    whose = "node's" if nodes and nodes[0] > 0 else "gang's"
    step = max(_MIN_STEP, min(_FULL_STEP, _HEIGHT // max(1, len(nodes))))
    return {
        **frame(),
        "height": {"step": step},
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.8 if step > 8 else 1.0}},
        "encoding": {
            "y": {
                "field": "node",
                "type": "ordinal",
                "scale": {"domain": nodes, "padding": 0},
                "axis": {"title": "node", "labelOverlap": True, "ticks": False, "domain": False},
            },
            "x": {
                "field": "from",
                "type": "quantitative",
                "axis": {"title": f"seconds since the {whose} begin", "tickCount": 6},
            },
            "x2": {"field": "to"},
            "color": {
                "field": "state",
                "type": "nominal",
                "scale": {"domain": states, "range": [COLOURS[state] for state in states]},
                "legend": {"orient": "top", "title": None, "columns": 4},
            },
            "tooltip": [{"field": field} for field in ("node", "host", "state", "from", "to")],
        },
    }
