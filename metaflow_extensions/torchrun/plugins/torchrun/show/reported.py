"""Sections of a gang's page with what the workers and nodes have told: progress, hangs, usage, outputs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..gang.progress import number, percent, speed, step
from ..gang.view import GangView
from ..texts import counted, names, size_text
from .charts import chart_of_values
from .parts import Bar, Block, Code, Facts, Part, Sentence, Table
from .words import trained_s

_NO_METRICS_S = 60.0  # a script that reports something may need so long until its first step
_NO_METRICS = (
    "No metrics: a script reports them with metaflow_torchrun.report(step=..., total=..., loss=...). "
    "help(metaflow_torchrun.report) explains it."
)
_HANG = (
    "The ranks of launch {} when it hung: your own frames of each stack, the innermost first. "
    "torchrun show --json has more of each stack."
)
_OUTPUT_LAUNCHES, _OUTPUT_FILES = 20, 5  # the last launches, and the first files of each
_USAGE_NODES = 16  # with more, those that use the most memory are shown
_USAGE_OF = {
    "container": "CPU and memory are those of the node's container.",
    "processes": "CPU and memory are those of the launch's processes: torchrun, the workers, and what they have started. "
    "The totals are those of the machine.",
}
# What nodes use, by kind: title and divisor. A limit has the name of its kind.
USAGE_COLUMNS = {
    "cpus": ("CPU, cores", 1),
    "memory_mib": ("memory, GiB", 1024),
    "gpu_percent": ("GPUs, %", 1),
    "gpu_memory_mib": ("GPU memory, GiB", 1024),
}


def progress(view: GangView) -> list[Part]:
    """Return what rank 0 has reported: a bar, the speed, a chart of each value; or that the scripts report nothing."""
    told = view.progress
    if told is None:
        return [Sentence(_NO_METRICS)] if (trained_s(view) or 0.0) > _NO_METRICS_S else []
    parts: list[Part] = []
    launch = told["launch"]
    if launch != view.launch:
        parts.append(
            Sentence(f"Launch {view.launch} has reported nothing so far. This is what launch {launch} reported.")
        )
    rows = (
        ("rank 0", step(told)),
        ("speed", ", ".join(speed(told)[: None if view.outcome == "running" else 1])),
        ("last values", ", ".join(f"{key} {number(value)}" for key, value in told["last"].items())),
    )
    parts += [Facts(rows)] if told["total"] is None else [Bar(percent(told), view.outcome), Facts(rows)]
    series = {key: points for key, points in told["series"].items() if len(points) > 1}
    return [*parts, *(chart_of_values(key, points, told["last"].get(key)) for key, points in series.items())]


def hangs(view: GangView) -> list[Part]:
    """Return where the ranks were in the last hang."""
    if view.hangs is None:
        return []
    blocks = [
        Block(f"{names(each['ranks'], 'Rank')}: {each['where']}", [Code(each["short"] or each["text"])])
        for each in view.hangs["stacks"]
        if each["text"]
    ]
    said, first = _HANG.format(view.hangs["launch"]), view.hangs["first"]
    said += f" Look at {names(first, 'rank')} first: {view.hangs['why']}." if first else ""
    return [Sentence(said), *blocks]


def outputs(view: GangView) -> list[Part]:
    """Return what each launch has stored."""
    rows = []
    for launch, nodes in list(view.outputs.items())[-_OUTPUT_LAUNCHES:]:
        files, size = (sum(each[name] for each in nodes.values()) for name in ("files", "size"))
        known = [name for each in nodes.values() for name in each["names"]][:_OUTPUT_FILES]
        named = f": {', '.join([*known, *(['…'] if len(known) < files else [])])}" if known else ""
        rows.append((f"launch {launch}", f"{counted(files, 'file')}, {size_text(size)}{named}"))
    return [Facts(rows)]


def usage(view: GangView) -> list[Part]:
    """Return the last and the highest values of each node, in a table."""
    nodes = view.usage
    if not nodes:
        return []  # not a sentence: a page that is shown can't have a table in its place (Metaflow 2.19)
    shown = sorted(nodes, key=lambda node: -nodes[node]["highest"].get("memory_mib", 0.0))[:_USAGE_NODES]
    kinds = [kind for kind in USAGE_COLUMNS if any(kind in each["last"] for each in nodes.values())]
    rows = [(str(node), *(_used(kind, nodes[node]) for kind in kinds)) for node in sorted(shown)]
    said = ["The last value of each, and the highest."]
    said += [text for of, text in _USAGE_OF.items() if any(each["of"] == of for each in nodes.values())]
    if len(nodes) > len(shown):
        said.append(f"Of {len(nodes)} nodes, the {len(shown)} that use the most memory are shown.")
    header = ("node", *(USAGE_COLUMNS[kind][0] for kind in kinds))
    return [Table(header, rows, ("node",)), Sentence(" ".join(said), "note")]


def _used(kind: str, node: Mapping[str, Any]) -> str:
    if kind not in node["last"]:
        return ""
    divisor, limit = USAGE_COLUMNS[kind][1], node["limits"].get(kind)
    last, highest = (f"{node[which][kind] / divisor:.3g}" for which in ("last", "highest"))
    return f"{last}, highest {highest}" + (f" of {limit / divisor:.4g}" if limit else "")
