"""Reports of a gang's end by others: by the task that replaces its control node, or by the submitting process. Pure.

Each of them stores its own `Word`. It never overwrites what the control node has stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..gang.cause import Cause
from ..gang.history import Record, Report
from ..gang.messages import CONTROL
from .snapshot import Snapshot


@dataclass(frozen=True)
class Word:
    """A report of a gang's end that the control node has not written itself."""

    text: str  # its first line is how the control node has ended, if that node has not recorded it
    time: float  # in seconds since 1970
    num_nodes: int
    error: str = "TorchrunPreempted"  # the class of the error with this text


def has_begun(snapshot: Snapshot | None) -> bool:
    """Return whether a gang had begun: another node had joined, or the control node had called `run`."""
    events = () if snapshot is None else snapshot.events
    return any((event.kind, event.node) != ("joined", CONTROL) for event in events)


def has_ended(snapshot: Snapshot | None) -> bool:
    """Return whether the control node itself has recorded its end."""
    return snapshot is not None and snapshot.summary.is_over


def host_of_control(snapshot: Snapshot | None) -> str:
    """Return the control node's host; empty if it is unknown."""
    nodes = () if snapshot is None else snapshot.summary.nodes
    return nodes[CONTROL].host if nodes else ""


def told_by_others(snapshot: Snapshot | None, words: Sequence[Word]) -> Snapshot | None:
    """Return the snapshot with `words` added. The first is the gang's end if the control node has recorded none."""
    if not words:
        return snapshot
    if snapshot is not None and has_ended(snapshot):
        at_s = snapshot.events[-1].at_s
        told = [Record("told", at_s, word.time, text="; ".join(word.text.splitlines())) for word in words]
        return replace(snapshot, events=(*snapshot.events, *told))
    known, word = snapshot or Snapshot(words[0].num_nodes), words[0]
    last = known.events[-1] if known.events else Record("", 0.0, word.time)
    at_s = round(max(last.at_s, word.time - (last.time - last.at_s)), 3)
    headline = word.text.partition("\n")[0]
    cause = Cause("lost", CONTROL, host_of_control(snapshot), exception=headline).as_dict()
    launch = known.summary.launch
    lost = Record("lost", at_s, word.time, launch=launch, node=CONTROL, text=headline)
    report = Report(at_s, launch, None, word.error, word.text, cause)
    return replace(known, events=(*known.events, lost), reports=(*known.reports, report), cause=cause, error=word.text)
