"""The usage section of the gang's page: the last and the highest values of each node, in a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..elements.model import Part, Sentence, Table

_MOST_NODES = 16  # with more, those that use the most memory are shown
_OF = {
    "container": "CPU and memory are those of the node's container.",
    "processes": "CPU and memory are those of the launch's processes: torchrun, the workers, and what they have started. "
    "The totals are those of the machine.",
}


class _Column(NamedTuple):
    """One kind of values, and how they are shown."""

    kind: str
    title: str
    divisor: float = 1.0
    limit: str = ""  # the node's limit, if it has one


COLUMNS = (
    _Column("cpus", "CPU, cores", limit="cpus"),
    _Column("memory_mib", "memory, GiB", 1024.0, "memory_mib"),
    _Column("gpu_percent", "GPUs, %"),
    _Column("gpu_memory_mib", "GPU memory, GiB", 1024.0, "gpu_memory_mib"),
)


def parts(nodes: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Return a table and a sentence; `nodes` is `GangView.usage`."""
    if not nodes:
        return []  # not a sentence: a page that is shown can't have a table in its place (Metaflow 2.19)
    shown = sorted(nodes, key=lambda node: -nodes[node]["highest"].get("memory_mib", 0.0))[:_MOST_NODES]
    columns = [column for column in COLUMNS if any(column.kind in each["last"] for each in nodes.values())]
    rows = [(str(node), *(_cell(column, nodes[node]) for column in columns)) for node in sorted(shown)]
    table = Table(("node", *(column.title for column in columns)), tuple(rows), ("node",))
    said = ["The last value of each, and the highest."]
    said += [text for of, text in _OF.items() if any(each["of"] == of for each in nodes.values())]
    if len(nodes) > len(shown):
        said.append(f"Of {len(nodes)} nodes, the {len(shown)} that use the most memory are shown.")
    return [table, Sentence(" ".join(said), "note")]


def _cell(column: _Column, node: Mapping[str, Any]) -> str:
    if column.kind not in node["last"]:
        return ""
    last, highest = (f"{node[which][column.kind] / column.divisor:.3g}" for which in ("last", "highest"))
    limit = node["limits"].get(column.limit)
    return f"{last}, highest {highest}" + (f" of {limit / column.divisor:.4g}" if limit else "")
