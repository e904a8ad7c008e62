"""What happened to a gang, record after record, in few lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..gang.history import Record
from ..gang.texts import names

# What each node or rank does for itself: of many, one line tells all who do it before the gang goes on.
_TOGETHER = {
    "joined": "{nodes} joined",
    "ready": "{nodes} called run",
    "started": "{nodes}: all workers run",
    "output": "{nodes}: first output",
    "exited": "{ranks} {text}",
    "stopped": "{nodes}: all workers are gone",
    "stopped before": "{nodes}: all commands are gone",
    "stored": "{nodes} stored outputs{because}",
    "finished": "{nodes}: the step has ended well",
    "left": "{nodes} left{because}",
}
# What concerns the gang as a whole, or is rare.
_ALONE = {
    "go": "start{because}",
    "go again": "start again{because}",
    "before_run": "start{because}",
    "hang": "hang: {text}",
    "timeout": "timeout: {text}",
    "preempted": "node {node} {text}",
    "dropped": "node {node} dropped out; the others go on",
    "stopping": "all workers are told to stop{because}",
    "stopping before": "all commands are told to stop{because}",
    "cause": "cause: {text}",
    "restart": "{text}",
    "done": "the launch has ended well",
    "failed": "the launch has failed{because}",
    "told": "{text}",
    "lost": "node {node} is lost: {text}",
    "broken": "nothing can be launched any more{because}",
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

    def add(self, record: Record) -> None:
        self.last = record
        for known, value in ((self.nodes, record.node), (self.ranks, record.rank), (self.seconds, record.seconds)):
            if value is not None:
                known.append(value)  # type: ignore[arg-type]

    def told(self, together: Mapping[str, str]) -> str:
        text = self.text
        if self.first.kind == "stored" and len(self.nodes) == 1:
            text = self.first.text
        if len(self.ranks or self.nodes) > 1:
            text = text.replace("was ", "were ", 1).replace("its step has", "their steps have", 1)
        least, most = f"{min(self.seconds, default=0.0):.1f}", f"{max(self.seconds, default=0.0):.1f}"
        return together[self.first.kind].format(
            nodes=names(self.nodes),
            ranks=names(self.ranks, "rank"),
            text=text,
            because=_because(text),
            took=f"{least} s" if least == most else f"{least}-{most} s",
        )


def timeline(records: Iterable[Record], more: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """Return when each thing happened ("3.2" or "3.2-4.0", in seconds), in which launch, and what.

    `more` is how kinds of features are told of several nodes or ranks at once (``Feature.together``).
    """
    together = {**_TOGETHER, **(more or {})}
    rows: list[tuple[str, str, str]] = []
    groups: dict[tuple[str, int | None, str], _Group] = {}
    said = ""  # the last text, which cause and verdict often repeat
    is_before = False  # whether commands run, and no workers

    def flush() -> None:
        rows.extend((_span(each), _launch(each.first), each.told(together)) for each in _worth(groups))
        groups.clear()

    for each in records:
        is_before = each.kind == "before_run" or (is_before and each.kind != "go")
        record = replace(each, kind=f"{each.kind} before") if is_before and each.kind in _OF_WORKERS else each
        if record.kind in together:
            _collect(groups, record, together[record.kind])
            continue
        flush()
        is_said = record.text.rstrip(".") == said
        if record.kind == "cause" and is_said:
            continue
        text = "" if is_said and record.kind in _MAY_BE_BRIEF else record.text
        said = record.text.rstrip(".") or said
        rows.append((f"{record.at_s:.1f}", _launch(record), _alone(record, text)))
    flush()
    return rows


def _worth(groups: dict[tuple[str, int | None, str], _Group]) -> list[_Group]:
    """Leave out that all workers of nodes are gone, where the ends of their ranks, or of commands, are told."""
    exited = {node for each in groups.values() if each.first.exit_code is not None for node in each.nodes}
    gone = ("stopped", "stopped before")
    return [each for each in groups.values() if each.first.kind not in gone or not exited.issuperset(each.nodes)]


def _collect(groups: dict[tuple[str, int | None, str], _Group], record: Record, template: str) -> None:
    text = record.text if "{text}" in template else ""
    if record.kind in ("exited", "left"):
        text = record.text.split(":")[0]  # a hint follows the colon, which the report has
    groups.setdefault((record.kind, record.launch, text), _Group(record, record, text)).add(record)


def _alone(record: Record, text: str) -> str:
    kind = "go again" if record.kind == "go" and record.generation else record.kind
    template = _ALONE.get(kind)  # a later version's is told as it is
    if template is None:
        return record.kind + _because(text)
    return template.format(node=record.node, text=text, because=_because(text))


def _span(group: _Group) -> str:
    first, last = f"{group.first.at_s:.1f}", f"{group.last.at_s:.1f}"
    return first if first == last else f"{first}-{last}"


def _launch(record: Record) -> str:
    """Name the launch, and the start of its workers where it is not the first: ``0``, ``0.1``."""
    if record.launch is None:
        return ""
    return f"{record.launch}.{record.generation}" if record.generation else str(record.launch)


def _because(text: str) -> str:
    return f": {text}" if text else ""
