"""Makes the lines of the timeline from a gang's records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..gang.history import Record
from ..gang.texts import names

# Kinds of a single node or rank. One line lists all nodes or ranks with such records in a row.
_TOGETHER = {
    "joined": "{nodes} joined",
    "before_run": "{nodes}: before_run begins",
    "command": "{nodes}: {text}, {took}",
    "ready": "{nodes} called run",
    "spare": "{nodes}: waiting as a spare",
    "dismissed": "{nodes}: not needed any more",
    "taken_in": "{nodes}: taking part from now on",
    "prepared": "{nodes}: before_run has ended well",
    "started": "{nodes}: all workers run",
    "output": "{nodes}: first output",
    "exited": "{ranks} {text}",
    "stored": "{nodes} stored outputs",
    "finished": "{nodes}: the step has ended well",
    "left": "{nodes} left{because}",
}
# Kinds that concern the gang as a whole, or are rare.
_ALONE = {
    "go": "start{because}",
    "go again": "start again{because}",
    "hang": "hang: {text}",
    "timeout": "timeout: {text}",
    "preempted": "node {node} {text}",
    "stopping": "all nodes are told to stop{because}",
    "cause": "cause: {text}",
    "restart": "{text}",
    "done": "the launch has ended well",
    "failed": "the launch has failed{because}",
    "told": "{text}",
    "lost": "node {node} is lost: {text}",
    "awaited": "another task takes the place of node {node}, which {text}",
    "left_out": "the others go on without node {node}, which {text}",
    "broken": "nothing can be launched any more{because}",
}
# Kinds whose text is omitted if the line before has the same text.
_MAY_BE_BRIEF = ("stopping", "failed", "broken")
_THE_NODE = "the node"  # the only one
# Not in the timeline: the chart of the nodes' states shows when a node's workers had ended.
_NOT_TOLD = ("stopped",)


@dataclass
class _Group:
    """Records of one kind, with the same text if the line has it."""

    text: str
    records: list[Record] = field(default_factory=list)

    def row(self, template: str, is_alone: bool) -> tuple[str, str, str]:
        nodes, ranks, took, times = (_known(self.records, name) for name in ("node", "rank", "seconds", "at_s"))
        text = self.text
        if len(ranks or nodes) > 1:
            text = text.replace("was ", "were ", 1).replace("its step has", "their steps have", 1)
        whose = _THE_NODE if is_alone else names(nodes)
        template = template.removeprefix("{nodes}: ") if is_alone else template
        told = template.format(
            nodes=whose, ranks=names(ranks, "rank"), text=text, because=_because(text), took=f"{_span(took)} s"
        )
        return _span(times), _launch(self.records[0]), told


def timeline(
    records: Iterable[Record], more: Mapping[str, str] | None = None, is_alone: bool = False
) -> list[tuple[str, str, str]]:
    """Return rows of time ("3.2" or "3.2-4.0", in seconds), launch, and event; of one node that `is_alone` no number.

    `more` has templates for the features' kinds, for several nodes or ranks at once (``OnPage.together``).
    """
    together = {**_TOGETHER, **(more or {})}
    records = list(records)
    causes = {(record.launch, record.generation): record.text for record in records if record.kind == "cause"}
    prepared = {(record.launch, record.node) for record in records if record.kind == "before_run"}
    rows: list[tuple[str, str, str]] = []
    groups: dict[tuple[str, int | None, str], _Group] = {}
    said = ""  # the last text; cause and verdict often repeat it
    for record in records:
        # After commands of before_run, a node is ready long after it has called `run`.
        kind = "prepared" if record.kind == "ready" and (record.launch, record.node) in prepared else record.kind
        if kind in together:
            text = _text_of(record, together[kind])
            groups.setdefault((kind, record.launch, text), _Group(text)).records.append(record)
        elif record.kind not in _NOT_TOLD:
            rows += [each.row(together[kind], is_alone) for (kind, _, _), each in groups.items()]
            groups.clear()
            told = record.text
            if record.kind == "stopping" and causes.get((record.launch, record.generation), told) != told:
                told = ""  # it names the failure that was seen first, and another one was the first
            is_said = told.rstrip(".") == said
            said = told.rstrip(".") or said
            if not (record.kind == "cause" and is_said):
                text = "" if is_said and record.kind in _MAY_BE_BRIEF else told
                rows.append((f"{record.at_s:.1f}", _launch(record), _alone(record, text, is_alone)))
    return [*rows, *(each.row(together[kind], is_alone) for (kind, _, _), each in groups.items())]


def _text_of(record: Record, template: str) -> str:
    """Return the text that the records of one line have in common."""
    if record.kind in ("exited", "left"):
        return record.text.split(":")[0]  # without the hint after the colon, which is in the report
    return record.text if "{text}" in template else ""


def _known(records: Iterable[Record], name: str) -> list[Any]:
    return [value for record in records if (value := getattr(record, name)) is not None]


def _alone(record: Record, text: str, is_alone: bool) -> str:
    kind = "go again" if record.kind == "go" and record.generation else record.kind
    template = _ALONE.get(kind)  # None for a kind of a later version
    if template is None:
        return record.kind + _because(text)
    if is_alone:
        template = template.replace("node {node}", _THE_NODE).replace("all nodes are", f"{_THE_NODE} is")
    return template.format(node=record.node, text=text, because=_because(text))


def _span(numbers: list[float]) -> str:
    """Return the range of some numbers, such as "1.0-2.5", or one number."""
    least, most = f"{min(numbers, default=0.0):.1f}", f"{max(numbers, default=0.0):.1f}"
    return least if least == most else f"{least}-{most}"


def _launch(record: Record) -> str:
    """Return the number of the launch, and after restarts that of the restart: ``0``, ``0.1``."""
    if record.launch is None:
        return ""
    return f"{record.launch}.{record.generation}" if record.generation else str(record.launch)


def _because(text: str) -> str:
    return f": {text}" if text else ""
