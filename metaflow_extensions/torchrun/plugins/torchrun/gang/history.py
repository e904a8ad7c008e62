"""The records of a gang, kept on the control node in the order in which it got the reports. Pure.

``docs/events.md`` tells users the kinds and the fields.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .group import Group

Kind = Literal[
    "joined", "ready", "go", "started", "output", "exited", "stopped", "finished", "left", "lost",
    "preempted", "hang", "timeout", "stopping", "cause", "restart", "done", "failed", "broken", "omitted",
    "stored", "before_run", "command", "told", "spare", "left_out", "awaited", "taken_in",
    "dismissed",
]  # fmt: skip
# The kinds that every node gets with a verdict. The others are about one node, and report no problem.
_OF_THE_GANG = frozenset(
    {
        "go",
        "lost",
        "preempted",
        "hang",
        "timeout",
        "unreachable",
        "stopping",
        "cause",
        "restart",
        "left_out",
        "awaited",
        "taken_in",
        "done",
        "failed",
        "broken",
        "omitted",
    }
)
# How many records are kept: the first and the last ones.
_FIRST, _LAST = 4000, 6000
_GOS = 200  # how many *go* of the dropped ones, the last ones
# How many records a message to another node has at most: with the longest texts they fill half a frame.
_TOLD_FIRST, _TOLD_LAST = 100, 200
# How many reports are kept, the last ones, and how many characters of each: stacks of many ranks are long.
_REPORTS, _REPORT_CHARS = 20, 128 * 1024


@dataclass(frozen=True)
class Record:
    """One event of the gang; a field that does not apply is None."""

    kind: str  # a `Kind`, or a feature's own
    at_s: float  # seconds since the gang's begin, by the control node's clock
    time: float  # the same moment in seconds since 1970
    launch: int | None = None
    generation: int | None = None
    node: int | None = None  # None: the gang as a whole
    rank: int | None = None  # global
    exit_code: int | None = None  # of a worker or a command; negative for a signal
    text: str = ""
    seconds: float | None = None  # how long a command took
    nproc: int | None = None  # of *go*: processes on each node, and
    group: Group | None = None  # the nodes that take part

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, with all fields."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """The full report of one failure; its `Record` has one line of it."""

    at_s: float
    launch: int | None = None
    generation: int | None = None
    error: str | None = None  # the class of what all nodes raise; None where they start their workers again
    text: str = ""  # with the traceback
    cause: dict[str, Any] | None = None  # as `Cause.as_dict` has it


class History:
    """The records of one gang."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._began_at = clock()
        self._began_wall = wall()
        self._first: list[Record] = []
        self._last: deque[Record] = deque(maxlen=_LAST)
        # *go* between these two, with its number: pages need to know which nodes had which ranks.
        self._gos: deque[tuple[int, Record]] = deque(maxlen=_GOS)
        self._reports: deque[Report] = deque(maxlen=_REPORTS)
        self.count = 0  # of all records, also those not kept

    def note(self, kind: Kind | str, **facts: Any) -> None:
        """Add a record, of a `Kind` or a feature's own; `facts` are fields of `Record`."""
        at_s = self._clock() - self._began_at
        record = Record(kind, round(at_s, 3), round(self._began_wall + at_s, 3), **facts)
        if len(self._last) == _LAST and self._last[0].kind == "go":
            self._gos.append((self.count - _LAST, self._last[0]))
        (self._first if len(self._first) < _FIRST else self._last).append(record)
        self.count += 1

    def report(
        self, error: str | None, text: str, cause: Mapping[str, Any] | None, launch: int | None, generation: int | None
    ) -> None:
        """Keep the whole report of a failure; one that is the same as the last is not kept twice."""
        more = len(text) - _REPORT_CHARS
        kept = f"{text[:_REPORT_CHARS]}\n… {more} characters are left out here" if more > 0 else text
        if not self._reports or self._reports[-1].text != kept:
            at_s = round(self._clock() - self._began_at, 3)
            self._reports.append(Report(at_s, launch, generation, error, kept, None if cause is None else dict(cause)))

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of the last failures, in order."""
        return tuple(self._reports)

    @property
    def records(self) -> tuple[Record, ...]:
        """All records that are kept; one record in the place of the dropped ones has their number."""
        return self.since(0)

    def since(self, mark: int) -> tuple[Record, ...]:
        """Return the records from number `mark` on; otherwise as `records`."""
        first, last = tuple(self._first), tuple(self._last)
        began = max(len(first), self.count - len(last))  # so many had been noted before those in `last`
        gos = tuple(record for number, record in self._gos if number >= mark)
        missing = began - max(len(first), mark) - len(gos)
        last = last[max(0, mark - began) :]
        return (*first[mark:], *gos, *([omitted(missing, last[0])] if missing > 0 and last else []), *last)


def of_the_gang(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records about the gang as a whole; of very many, the first and the last ones."""
    found = tuple(record for record in records if record.kind in _OF_THE_GANG)
    missing = len(found) - _TOLD_FIRST - _TOLD_LAST
    if missing <= 0:
        return found
    last = found[-_TOLD_LAST:]
    return (*found[:_TOLD_FIRST], omitted(missing, last[0]), *last)


def omitted(count: int, after: Record) -> Record:
    """Return the record that stands for `count` dropped ones; `after` is the next one."""
    return Record("omitted", after.at_s, after.time, text=f"{count} records are left out here")
