"""What others tell of a gang's end: the task that has come in its control node's place, or the submitting process. Pure.

Each of them stores a `Word` of its own, beside what the control node has stored and never in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cause import Cause
from .history import Record, Report
from .protocol import CONTROL


@dataclass(frozen=True)
class Word:
    """What somebody else has to say of a gang's end."""

    text: str  # the first line says how the control node has ended, if it has not told so itself
    time: float  # in seconds since 1970
    num_nodes: int
    error: str = "TorchrunPreempted"  # the class of the error that says so


def has_begun(content: Mapping[str, Any] | None) -> bool:
    """Tell whether more than the control node's own code can have run: another node has joined, or it has called run."""
    alone = {"kind": "joined", "node": CONTROL}
    return any(alone.items() - event.items() for event in (content or {}).get("events", ()))


def has_ended(content: Mapping[str, Any] | None) -> bool:
    """Tell whether the control node itself has told its end."""
    return any(event["kind"] == "left" and event["node"] == CONTROL for event in (content or {}).get("events", ()))


def host_of_control(content: Mapping[str, Any] | None) -> str:
    """Return the control node's host; empty where that is not known."""
    of_control = {"kind": "joined", "node": CONTROL}.items()
    return next((event["text"] for event in (content or {}).get("events", ()) if of_control <= event.items()), "")


def told_by_others(content: Mapping[str, Any] | None, words: Sequence[Word]) -> dict[str, Any] | None:
    """Return what is known of a gang with `words`; the first is its end if the control node has not told its own."""
    if not words:
        return None if content is None else dict(content)
    if content is not None and has_ended(content):
        at_s = content["events"][-1]["at_s"]
        told = [Record("told", at_s, word.time, text="; ".join(word.text.splitlines())).as_dict() for word in words]
        return {**content, "events": [*content["events"], *told]}
    known: dict[str, Any] = dict(content or {"version": 1, "num_nodes": words[0].num_nodes, "nproc_per_node": None})
    events, word = list(known.get("events", ())), words[0]
    last = events[-1] if events else {"at_s": 0.0, "time": word.time}
    at_s = round(max(last["at_s"], word.time - (last["time"] - last["at_s"])), 3)
    launch = next((event["launch"] for event in reversed(events) if event["launch"] is not None), None)
    headline = word.text.partition("\n")[0]
    cause = Cause("lost", CONTROL, host_of_control(content), exception=headline).as_dict()
    lost = Record("lost", at_s, word.time, launch=launch, node=CONTROL, text=headline)
    report = Report(at_s, launch, None, word.error, word.text, cause)
    return {
        **known,
        "events": [*events, lost.as_dict()],
        "reports": [*known.get("reports", ()), asdict(report)],
        "cause": cause,
        "error": word.text,
    }
