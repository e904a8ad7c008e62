"""What each node uses over time, as small charts for Metaflow's `VegaChart`. Pure.

Of few nodes each has a line. Of many there is a band from the lowest to the highest, a line for the median, and lines
for the few nodes that are far from it. So a page has a bounded size, however large the gang is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..gang.texts import counted, duration
from ..gang.usage import KINDS, coarser
from .drawing import one_line
from .style import LINES

Component: TypeAlias = dict[str, Any]
_Values: TypeAlias = list[float | None]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_HEIGHT = 110
_MOST_LINES = len(LINES)  # more nodes get a band
_MOST_POINTS = 120  # of one line: a chart is hardly wider than that on a phone
_MOST_OUTLIERS = 3
# How far a node's mean is from the median of all before it is named: so many times the usual distance (MAD, as a
# standard deviation), and at least this part of the median.
_FAR, _FAR_PART = 5 * 1.4826, 0.2
_BRIDGED = 2  # so many missing values in a row may be a late sample; more are a gap in the line
_GREY, _FAINT = "#808893", "rgba(128, 136, 147, 0.25)"  # to be read on white and on black
_BAND = "rgba(59, 130, 246, 0.25)"
_OF = {
    "container": "CPU and memory are those of the node's container.",
    "processes": "CPU and memory are those of the launch's processes: torchrun, the workers, and what they have started. "
    "What there is of both is the machine's.",
}
_TIMES = ((3 * 3600.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class _Panel(NamedTuple):
    """One chart: what it shows of which kind of values, and by how much they are divided."""

    kind: str
    title: str
    unit: str
    divisor: float = 1.0
    limit: str = ""  # which of the node's limits is told with it


_PANELS = (
    _Panel("cpus", "CPU", "cores", limit="cpus"),
    _Panel("memory_mib", "Memory", "GiB", 1024.0, "memory_mib"),
    _Panel("gpu_percent", "GPU utilisation", "%"),
    _Panel("gpu_memory_mib", "GPU memory", "GiB", 1024.0, "gpu_memory_mib"),
    _Panel("received_kib_s", "Network, received", "MiB/s", 1024.0),
    _Panel("sent_kib_s", "Network, sent", "MiB/s", 1024.0),
    _Panel("output_lines_s", "Output", "lines/s"),
    _Panel("output_bytes_s", "Output", "KiB/s", 1024.0),
)
assert {panel.kind for panel in _PANELS} == set(KINDS)


def usage_parts(usage: Mapping[str, Any]) -> list[Component]:
    """Return the words and the charts, each with an id; `usage` is what ``gang/usage`` keeps of all nodes."""
    nodes = {int(node): series for node, series in usage["nodes"].items()}
    step_s, series = _coarser(usage["step_s"], nodes)
    charts = [_chart(panel, step_s, series, _title(panel, nodes)) for panel in _shown(nodes)]
    words = {"type": "markdown", "id": "gang-usage-words", "source": f'<div class="tr">{_words(step_s, nodes)}</div>'}
    # A section, so that a chart can come later: what has an id can be replaced, and nothing can be added.
    return [words, {"type": "section", "id": "gang-usage", "columns": 2, "contents": charts}]


def node_parts(usage: Mapping[str, Any], node: int) -> list[Component]:
    """Return the same for one node alone."""
    return usage_parts({**usage, "nodes": {key: each for key, each in usage["nodes"].items() if int(key) == node}})


def _shown(nodes: Mapping[int, Any]) -> list[_Panel]:
    """Return the charts of which something was measured; of the output its lines or, where they aren't known, bytes."""
    found = [panel for panel in _PANELS if any(panel.kind in series for series in nodes.values())]
    has_lines = any(panel.kind == "output_lines_s" for panel in found)
    return [panel for panel in found if not (has_lines and panel.kind == "output_bytes_s")]


def _coarser(step_s: float, nodes: Mapping[int, Mapping[str, Any]]) -> tuple[float, dict[int, dict[str, _Values]]]:
    """Return the nodes' values with as many points as a chart shows, and how long one is."""
    found = {node: {kind: series[kind] for kind in KINDS if kind in series} for node, series in nodes.items()}
    while any(len(values) > _MOST_POINTS for series in found.values() for values in series.values()):
        step_s *= 2
        found = {node: {kind: coarser(kind, each) for kind, each in series.items()} for node, series in found.items()}
    return step_s, found


# --- in words -------------------------------------------------------------------------------------


def _words(step_s: float, nodes: Mapping[int, Mapping[str, Any]]) -> str:
    if not nodes:
        return f"<p>{one_line('Nothing has been measured.')}</p>"
    said = [f"A point stands for {duration(step_s)}. Time runs as in the timeline."]
    said += [_OF[of] for of in _OF if any(series.get("of") == of for series in nodes.values())]
    if len(nodes) > _MOST_LINES:
        said.append(
            f"The line is the median of {len(nodes)} nodes, the band goes from the lowest to the highest. Nodes that are "
            "far from the others are named."
        )
    return f"<p>{one_line(' '.join(said))}</p>{_legend(sorted(nodes))}"


def _legend(nodes: Sequence[int]) -> str:
    if not 1 < len(nodes) <= _MOST_LINES:
        return ""
    return "".join(f'<span class="tr-key tr-line-{place}">node {node}</span>' for place, node in enumerate(nodes))


def _title(panel: _Panel, nodes: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what a chart shows, with what there is of it where all nodes have the same."""
    limits = {series.get("limits", {}).get(panel.limit) for series in nodes.values()}
    gpus = {series.get("limits", {}).get("gpus") for series in nodes.values()}
    limit = limits.pop() if len(limits) == 1 else None
    of = f" of {limit / panel.divisor:.4g}" if limit else ""
    count = gpus.pop() if len(gpus) == 1 else None
    whose = f", {counted(int(count), 'GPU')} a node" if panel.kind.startswith("gpu") and count else ""
    return f"{panel.title}, {panel.unit}{of}{whose}" if not of else f"{panel.title}{of} {panel.unit}{whose}"


# --- a chart --------------------------------------------------------------------------------------


def _chart(panel: _Panel, step_s: float, nodes: Mapping[int, Mapping[str, Any]], title: str) -> Component:
    values = {
        node: _divided(series[panel.kind], panel.divisor) for node, series in nodes.items() if panel.kind in series
    }
    length = max(map(len, values.values()))
    unit_s, unit = next((each, name) for least, each, name in _TIMES if length * step_s >= least)
    times = [round((number + 0.5) * step_s / unit_s, 3) for number in range(length)]
    layers = _lines(times, values) if len(nodes) <= _MOST_LINES else _band(times, values)
    return {
        "type": "vegaChart",
        "id": f"gang-usage-{panel.kind}",
        "spec": _spec(title, unit, layers, {"domain": [0, 100]} if panel.unit == "%" else {"zero": True}),
        "options": {"actions": False},
    }


def _divided(values: _Values, divisor: float) -> _Values:
    return [None if value is None else float(f"{value / divisor:.3g}") for value in values]


def _lines(times: list[float], values: Mapping[int, _Values]) -> list[Component]:
    """Return a line for each node."""
    rows = [_row(f"node {node}", times, series) for node, series in values.items()]
    names = [row["node"] for row in rows]
    colour = {"field": "node", "scale": {"domain": names, "range": list(LINES)}, "legend": None}
    return [_line(rows, {"color": colour})]


def _row(name: str, times: list[float], values: _Values) -> Component:
    """Return one line as columns, without the times of which nothing is known, unless they are many in a row."""
    kept = [place for place, value in enumerate(values) if value is not None]
    at: list[float] = []
    found: _Values = []
    for before, place in zip([kept[0], *kept], kept, strict=False):
        if place - before > _BRIDGED + 1:
            at.append(times[before + 1])
            found.append(None)
        at.append(times[place])
        found.append(values[place])
    return {"node": name, "t": at, "v": found}


def _line(rows: list[Component], encoding: Component) -> Component:
    is_short = all(len(row["t"]) < 2 for row in rows)
    return {
        "data": {"values": rows},
        "transform": [{"flatten": ["t", "v"]}],
        # Points carry the words that a mouse finds. They are seen only where there is no line between two yet.
        "mark": {"type": "line", "strokeWidth": 1.5, "point": {"opacity": int(is_short), "size": 60}},
        "encoding": {
            "x": {"field": "t"},
            "y": {"field": "v"},
            "detail": {"field": "node"},
            "tooltip": [{"field": "node"}, {"field": "t", "title": "time"}, {"field": "v", "title": "value"}],
            **encoding,
        },
    }


def _band(times: list[float], values: Mapping[int, _Values]) -> list[Component]:
    """Return what many nodes have in common, and lines for the few that differ."""
    columns = [sorted(v for v in column if v is not None) for column in _columns(values.values(), len(times))]
    there = [(at, column) for at, column in zip(times, columns, strict=True) if column]
    band = {
        "t": [at for at, _ in there],
        "low": [column[0] for _, column in there],
        "high": [column[-1] for _, column in there],
    }
    median = [float(f"{statistics.median(column):.3g}") for _, column in there]
    far = [_row(f"node {node}", times, values[node]) for node in outliers(values)]
    layers = [
        {
            "data": {"values": [band]},
            "transform": [{"flatten": ["t", "low", "high"]}],
            "mark": {"type": "area", "color": _BAND},
            "encoding": {"x": {"field": "t"}, "y": {"field": "low"}, "y2": {"field": "high"}},
        },
        _line([{"node": "median", "t": band["t"], "v": median}], {"color": {"value": LINES[0]}}),
    ]
    for row, colour in zip(far, LINES[1:], strict=False):
        end = {"node": row["node"], "t": row["t"][-1], "v": row["v"][-1]}
        words = {"x": {"field": "t"}, "y": {"field": "v"}, "text": {"field": "node"}}
        mark = {"type": "text", "align": "right", "dy": -7, "color": colour, "fontWeight": "bold"}
        layers += [
            _line([row], {"color": {"value": colour}}),
            {"data": {"values": [end]}, "mark": mark, "encoding": words},
        ]
    return layers


def _columns(values: Any, length: int) -> list[list[float | None]]:
    rows = list(values)
    return [[row[place] for row in rows if place < len(row)] for place in range(length)]


def outliers(values: Mapping[int, _Values]) -> list[int]:
    """Return the nodes whose mean is far from that of the others, the farthest first."""
    means = {node: statistics.fmean(v for v in series if v is not None) for node, series in values.items()}
    middle = statistics.median(means.values())
    distances = {node: abs(mean - middle) for node, mean in means.items()}
    usual = statistics.median(distances.values())
    far = [node for node, each in distances.items() if each > max(_FAR * usual, _FAR_PART * abs(middle))]
    return sorted(far, key=lambda node: -distances[node])[:_MOST_OUTLIERS]


def _spec(title: str, unit: str, layers: list[Component], scale: Component) -> Component:
    text = {"labelColor": _GREY, "titleColor": _GREY}
    time = {"title": unit, "tickCount": 5, "grid": False, "titleAnchor": "end", "titlePadding": 0}
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": _HEIGHT,
        "background": None,
        "title": {"text": title, "anchor": "start", "color": _GREY, "fontSize": 12, "fontWeight": "bold"},
        "encoding": {
            "x": {"type": "quantitative", "axis": time, "scale": {"zero": True, "nice": False}},
            "y": {
                "type": "quantitative",
                "axis": {"title": None, "tickCount": 4, "minExtent": 32},
                "scale": scale,
            },
        },
        "layer": layers,
        "config": {
            "axis": {**text, "gridColor": _FAINT, "domainColor": _FAINT, "tickColor": _FAINT},
            "view": {"stroke": None},
        },
    }
