"""How are the records of a gang told in a few lines? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..gang.history import Record
from ..gang.texts import names

# What each node or rank does for itself: of many, one line tells all who do it before the gang goes on.
_TOGETHER: dict[str, Callable[[_Group], str]] = {
    "joined": lambda group: f"{names(group.nodes)} joined",
    "ready": lambda group: f"{names(group.nodes)} called run",
    "started": lambda group: f"{names(group.nodes)}: all workers run",
    "output": lambda group: f"{names(group.nodes)}: first output",
    "straggler": lambda group: f"{names(group.ranks, 'rank')}: slower than half the median for a minute",
    "recovered": lambda group: f"{names(group.ranks, 'rank')}: no longer slow",
    "command": lambda group: f"{names(group.nodes)}: {group.text}, {_took(group.seconds)}",
    "exited": lambda group: f"{names(group.ranks, 'rank')} {_of_all(group)}",
    "stopped": lambda group: f"{names(group.nodes)}: all workers are gone",
    "stored": lambda group: (
        f"{names(group.nodes)} stored outputs" + (f": {group.first.text}" if len(group.nodes) == 1 else "")
    ),
    "stopped before": lambda group: f"{names(group.nodes)}: all commands are gone",
    "finished": lambda group: f"{names(group.nodes)}: the step has ended well",
    "left": lambda group: f"{names(group.nodes)} left" + (f": {_of_all(group)}" if group.text else ""),
}
_ALONE: dict[str, Callable[[Record], str]] = {
    "go": lambda record: f"{'start' if not record.generation else 'start again'}: {record.text}",
    "before_run": lambda record: f"start: {record.text}",
    "hang": lambda record: f"hang: {record.text}",
    "timeout": lambda record: f"timeout: {record.text}",
    "preempted": lambda record: f"node {record.node} {record.text}",
    "dropped": lambda record: f"node {record.node} dropped out; the others go on",
    "stopping": lambda record: "all workers are told to stop" + _because(record),
    "stopping before": lambda record: "all commands are told to stop" + _because(record),
    "cause": lambda record: f"cause: {record.text}",
    "restart": lambda record: record.text,
    "done": lambda record: "the launch has ended well",
    "failed": lambda record: "the launch has failed" + _because(record),
    "told": lambda record: record.text,
    "lost": lambda record: f"node {record.node} is lost: {record.text}",
    "broken": lambda record: "nothing can be launched any more" + _because(record),
}

# What stands without its text where the line before has said it.
_MAY_BE_BRIEF = ("stopping", "stopping before", "failed", "broken")
# What is told in other words while commands of before_run run; its kind gets " before".
_OF_WORKERS = ("stopping", "stopped")


@dataclass
class _Group:
    """Records of one kind, and of one text where it matters."""

    first: Record
    last: Record
    text: str
    nodes: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def timeline(records: Iterable[Record]) -> list[tuple[str, str, str]]:
    """Return when each thing happened ("3.2" or "3.2-4.0", in seconds), in which launch, and what."""
    rows: list[tuple[str, str, str]] = []
    groups: dict[tuple[str, int | None, str], _Group] = {}
    said = ""  # the last text, which cause and verdict often repeat
    is_before = False  # whether commands run, and no workers

    def flush() -> None:
        rows.extend((_span(each), _launch(each.first), _TOGETHER[each.first.kind](each)) for each in _worth(groups))
        groups.clear()

    for each in records:
        is_before = each.kind == "before_run" or (is_before and each.kind != "go")
        record = replace(each, kind=f"{each.kind} before") if is_before and each.kind in _OF_WORKERS else each
        if record.kind in _TOGETHER:
            _collect(groups, record)
            continue
        flush()
        is_said = record.text.rstrip(".") == said
        if record.kind == "cause" and is_said:
            continue
        shown = replace(record, text="") if is_said and record.kind in _MAY_BE_BRIEF else record
        said = record.text.rstrip(".") or said
        rows.append((f"{record.at_s:.1f}", _launch(record), _ALONE.get(record.kind, _unknown)(shown)))
    flush()
    return rows


def _worth(groups: dict[tuple[str, int | None, str], _Group]) -> list[_Group]:
    """Leave out that all workers of nodes are gone, where the ends of their ranks, or of commands, are told."""
    exited = {node for each in groups.values() if each.first.kind in ("exited", "command") for node in each.nodes}
    gone = ("stopped", "stopped before")
    return [each for each in groups.values() if each.first.kind not in gone or not exited.issuperset(each.nodes)]


def _collect(groups: dict[tuple[str, int | None, str], _Group], record: Record) -> None:
    # A hint follows the colon, which the report has; the text of who joined is its host.
    brief = record.text.split(":")[0] if record.kind in ("exited", "left") else ""
    text = record.text if record.kind == "command" else brief
    group = groups.setdefault((record.kind, record.launch, text), _Group(record, record, text))
    group.last = record
    if record.node is not None:
        group.nodes.append(record.node)
    if record.rank is not None:
        group.ranks.append(record.rank)
    if record.seconds is not None:
        group.seconds.append(record.seconds)


def _took(seconds: list[float]) -> str:
    """Say how long something took, on the fastest and on the slowest node."""
    first, last = f"{min(seconds, default=0.0):.1f}", f"{max(seconds, default=0.0):.1f}"
    return f"{first} s" if first == last else f"{first}-{last} s"


def _of_all(group: _Group) -> str:
    """Say how ranks or nodes ended, of one or of several."""
    if len(group.ranks or group.nodes) == 1:
        return group.text
    return group.text.replace("was ", "were ", 1).replace("its step has", "their steps have", 1)


def _span(group: _Group) -> str:
    first, last = f"{group.first.at_s:.1f}", f"{group.last.at_s:.1f}"
    return first if first == last else f"{first}-{last}"


def _launch(record: Record) -> str:
    """Name the launch, and the start of its workers where it is not the first: ``0``, ``0.1``."""
    if record.launch is None:
        return ""
    return f"{record.launch}.{record.generation}" if record.generation else str(record.launch)


def _because(record: Record) -> str:
    return f": {record.text}" if record.text else ""


def _unknown(record: Record) -> str:
    return record.kind + _because(record)
