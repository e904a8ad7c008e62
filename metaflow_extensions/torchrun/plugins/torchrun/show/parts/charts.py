"""What all charts of a gang's page have in common: colours for light and dark, and the frame of Vega-Lite. Pure."""

from __future__ import annotations

from typing import Any

# Of nodes and of ranks, in the order of a life. Each can be told from the others on white and on black.
COLOURS = {
    "missing": "#c3c9d1",
    "own code": "#9c8fc4",
    "waiting": "#d0b25c",
    "preparing": "#06b6d4",
    "starting": "#3b82f6",
    "running": "#22a35a",
    "stopping": "#f59e0b",
    "restarting": "#a855f7",
    "stopped": "#6b7a90",
    "done": "#0d9488",
    "finished": "#0d9488",
    "failed": "#dc3545",
    "lost": "#e0457b",
}

# Of lines in charts, in this order; as far as eight can be told apart, on white and on black.
LINES = ("#3b82f6", "#e8710a", "#22a35a", "#e0457b", "#8b62d9", "#b8960c", "#0aa3b5", "#9a6b4f")
GREY, _FAINT = "#808893", "rgba(128, 136, 147, 0.25)"  # to be read on white and on black


def frame(title: str = "", height: Any = None) -> dict[str, Any]:
    """Return a chart without data: its width is the page's, its texts can be read on the page."""
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
