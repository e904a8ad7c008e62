"""Colours for light and dark, time axes and the Vega-Lite frame that all charts of the page share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
GREY, _FAINT = "#808893", "rgba(128, 136, 147, 0.25)"  # readable on white and on black


def time_unit(length_s: float) -> tuple[float, str]:
    """Return the unit of all time axes of a page, by the gang's age: its seconds and its name."""
    return next((unit_s, name) for least_s, unit_s, name in _UNITS if length_s >= least_s)


def time_axis(length_s: float, axis: Mapping[str, Any]) -> dict[str, Any]:
    """Return the x axis of a chart over time, from the gang's start to now, the same for all charts."""
    unit_s, unit = time_unit(length_s)
    scale = {"domain": [0, round(max(length_s, 1.0) / unit_s, 3)], "nice": False}
    return {"type": "quantitative", "axis": {"title": f"{unit} since the start", **axis}, "scale": scale}


def frame(title: str = "", height: Any = None) -> dict[str, Any]:
    """Return a chart without data, as wide as the page, with texts that are readable on it."""
    text = {"labelColor": GREY, "titleColor": GREY}
    found: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": "container",
        "height": height,
        "background": None,
        "config": {
            "axis": {**text, "gridColor": _FAINT, "domainColor": _FAINT, "tickColor": _FAINT},
            "legend": text,
            "title": {"color": GREY},
            "view": {"stroke": None},
        },
    }
    if title:
        found["title"] = {"text": title, "anchor": "start", "fontSize": 12, "fontWeight": "bold", "limit": 400}
    return found
