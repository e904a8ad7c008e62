"""The usage section of the gang's page: small charts of each node's usage over time. Pure.

With few nodes, each has a line. With many, each chart has three: the nodes with the highest, the median and the lowest
mean. So a page has a bounded size for any gang.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ...elements.charts import GREY, LINES, frame, restart_marks, time_axis, time_unit
from ...elements.model import Chart, Keys, Part, Sentence
from ...gang.texts import counted, duration
from ...records.on_page import OnPage
from ...records.summary import Summary

_Values: TypeAlias = list[float | None]
_Nodes: TypeAlias = dict[int, Mapping[str, Any]]

_HEIGHT = 110
_MOST_LINES = len(LINES)  # with more nodes, only three have a line
_BRIDGED = 2  # the line is drawn over this many missing values (a late sample); more are a gap
_OF = {
    "container": "CPU and memory are those of the node's container.",
    "processes": "CPU and memory are those of the launch's processes: torchrun, the workers, and what they have started. "
    "The totals are those of the machine.",
}


class _Panel(NamedTuple):
    """One chart: its kind of values from ``features/usage``, and how they are shown."""

    kind: str
    title: str
    unit: str
    divisor: float = 1.0
    limit: str = ""  # the node's limit in its title


_PANELS = (
    _Panel("cpus", "CPU", "cores", limit="cpus"),
    _Panel("memory_mib", "Memory", "GiB", 1024.0, "memory_mib"),
    _Panel("gpu_percent", "GPU utilisation", "%"),
    _Panel("gpu_memory_mib", "GPU memory", "GiB", 1024.0, "gpu_memory_mib"),
    _Panel("received_kib_s", "Network, received", "MiB/s", 1024.0),
    _Panel("sent_kib_s", "Network, sent", "MiB/s", 1024.0),
    _Panel("output_bytes_s", "Output", "KiB/s", 1024.0),
)


class UsageOnPage(OnPage):
    """The usage of the nodes."""

    after = "timeline"

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return the charts; runs of old versions have none."""
        return usage_parts(kept, summary) if kept else ()


def usage_parts(usage: Mapping[str, Any], summary: Summary) -> list[Part]:
    """Return sentences and charts; `usage` is the record of `keep.UsageKeeper`."""
    nodes: _Nodes = {int(node): series for node, series in usage["nodes"].items()}
    if not nodes:
        return [Sentence("Nothing has been measured.", "note")]
    step_s = usage["step_s"]
    shown = [panel for panel in _PANELS if any(panel.kind in series for series in nodes.values())]
    said, *legend = _words(step_s, nodes)
    return [*legend, *(_chart(panel, step_s, nodes, summary) for panel in shown), said]


# --- in words -------------------------------------------------------------------------------------


def _words(step_s: float, nodes: _Nodes) -> list[Part]:
    said = [f"Each point covers {duration(step_s)}. The times are those of the timeline."]
    said += [_OF[of] for of in _OF if any(series.get("of") == of for series in nodes.values())]
    if len(nodes) > _MOST_LINES:
        said.append(f"Of {len(nodes)} nodes each chart shows three, by their means: highest, median and lowest.")
    legend = [Keys(tuple((f"node {node}", f"line-{place}") for place, node in enumerate(sorted(nodes))))]
    return [Sentence(" ".join(said), "note"), *(legend if 1 < len(nodes) <= _MOST_LINES else [])]


def _title(panel: _Panel, nodes: _Nodes) -> str:
    """Return the title of a chart, with the limit if all nodes have the same."""
    limit, gpus = _same_limit(panel.limit, nodes), _same_limit("gpus", nodes)
    title = (
        f"{panel.title}: {panel.unit} used of {limit / panel.divisor:.4g}" if limit else f"{panel.title}, {panel.unit}"
    )
    return f"{title}, {counted(int(gpus), 'GPU')} a node" if gpus and panel.kind.startswith("gpu") else title


def _same_limit(name: str, nodes: _Nodes) -> float | None:
    limits = {series.get("limits", {}).get(name) for series in nodes.values()}
    return limits.pop() if len(limits) == 1 else None


# --- a chart --------------------------------------------------------------------------------------


def _chart(panel: _Panel, step_s: float, nodes: _Nodes, summary: Summary) -> Part:
    title, are_many = _title(panel, nodes), len(nodes) > _MOST_LINES
    values = {node: series[panel.kind] for node, series in nodes.items() if panel.kind in series}
    length_s = max(summary.seconds, max(map(len, values.values())) * step_s)
    unit_s, _ = time_unit(length_s)
    names = picked(values) if are_many else {node: _name(node, summary) for node in values}
    rows = [_row(name, step_s / unit_s, panel.divisor, values[node]) for node, name in names.items()]
    last = ", ".join(f"{row['v'][-1]:g}" if summary.is_alone else f"{row['node']} {row['v'][-1]:g}" for row in rows)
    scale = {"domain": [0, 100]} if panel.unit == "%" else {"zero": True}
    if all(len(row["t"]) < 2 for row in rows):  # a chart of one dot shows less than its number
        return Sentence(f"{title}: {last}")
    time = {"tickCount": 5, "grid": False, "titleAnchor": "end", "titlePadding": 0}
    value = {"title": None, "tickCount": 4, "minExtent": 32}
    spec = {
        **frame(title, _HEIGHT),
        "encoding": {"x": time_axis(length_s, time), "y": {"type": "quantitative", "axis": value, "scale": scale}},
        "layer": [_layer(rows, with_legend=are_many), *restart_marks(summary.restarts_s, length_s)],
    }
    return Chart(spec, f"{title}: {last}")


def _name(node: int, summary: Summary) -> str:
    return "the node" if summary.is_alone else f"node {node}"


def picked(values: Mapping[int, _Values]) -> dict[int, str]:
    """Return the nodes with the highest, the median and the lowest mean, each once, and their names."""
    means = {node: statistics.fmean(v for v in series if v is not None) for node, series in values.items()}
    ranked = sorted(means, key=lambda node: -means[node])
    shown = {ranked[0]: "highest", ranked[len(ranked) // 2]: "median", ranked[-1]: "lowest"}
    return {node: f"{which}: node {node}" for node, which in shown.items()}


def _row(name: str, step: float, divisor: float, values: _Values) -> dict[str, Any]:
    """Return one line as columns. Missing values are left out; many in a row become a gap."""
    times: list[float] = []
    found: _Values = []
    missing = 0
    for place, value in enumerate(values):
        if value is None:
            missing += 1
            continue
        if found and missing > _BRIDGED:
            times.append(round((place - 0.5) * step, 3))
            found.append(None)
        times.append(round((place + 0.5) * step, 3))
        found.append(float(f"{value / divisor:.3g}"))
        missing = 0
    return {"node": name, "t": times, "v": found}


def _layer(rows: list[dict[str, Any]], with_legend: bool) -> dict[str, Any]:
    """Return the lines of a chart, without a legend if the page has one for all charts."""
    legend = {"title": None, "orient": "bottom", "labelColor": GREY} if with_legend else None
    scale = {"domain": [row["node"] for row in rows], "range": list(LINES)}
    return {
        "data": {"values": rows},
        "transform": [{"flatten": ["t", "v"]}],
        # Invisible points carry the tooltips.
        "mark": {"type": "line", "strokeWidth": 1.5, "point": {"opacity": 0, "size": 60}},
        "encoding": {
            "x": {"field": "t"},
            "y": {"field": "v"},
            "detail": {"field": "node"},
            "tooltip": [{"field": "node"}, {"field": "t", "title": "time"}, {"field": "v", "title": "value"}],
            "color": {"field": "node", "scale": scale, "legend": legend},
        },
    }


PART = UsageOnPage()
