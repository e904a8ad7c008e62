"""What a node observes of its workers while a generation runs, and tells the gang.

No observer decides anything: one that raises ends no launch. A line in the log's details says so once, and it is left out
of this generation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..compat.renamed import harmless
from ..gang.messages import Go, Report
from ..gang.wire import Plain
from ..launch.call import Call
from ..machine.aside import Aside


@dataclass(frozen=True)
class Here:
    """One generation on this node, as its observers see it."""

    call: Call
    go: Go
    folder: str  # torchrun's --log-dir
    pid: Callable[[], int | None]  # of the agent, once it runs
    has_ended: Callable[[int], bool]  # takes a global rank
    say: Callable[[str], None]  # writes a line to the log's details
    show: Callable[[str], None]  # writes lines to the log
    running: Callable[[], Mapping[int, int]]  # returns the workers that run: global rank -> pid
    active_at: Callable[[], float | None]  # returns when a worker was last found to have written, reported or ended
    written: Callable[[], int]  # returns how many bytes the workers have written to stdout and stderr
    is_held_up: Callable[[], bool] = lambda: False  # returns whether the workers wait for who reads their output
    host: str = ""
    files: Aside = field(default_factory=Aside)  # does what the workers' disk may hold up


class Observer:
    """Observes one generation. It shares the supervisor's loop, so nothing here may wait for long."""

    # When it last had something from the workers themselves, which shows that they run.
    saw_workers_at: float | None = None

    def poll(self) -> Plain | None:
        """Return the data to send now; called at least twice a second, so mostly None."""
        return None

    async def before_stop(self, kind: str) -> Plain | None:
        """Examine the workers before they are stopped for a cause of this kind; return the data to send."""
        return None

    def ask(self, data: Plain) -> None:
        """Begin to find out what a command asks; `poll` returns the answer later."""

    async def ended(self) -> Plain | None:
        """Return the last data to send, when all workers have ended."""
        return None

    def close(self) -> None:
        """Release everything."""


class Observers:
    """The observers of one generation, by the kind of report that each sends."""

    def __init__(self, here: Here, makers: Mapping[str, Callable[[Here], Observer]]) -> None:
        self._here = here
        self._observers: dict[str, Observer] = {}
        for kind, make in makers.items():
            with self._no_harm(kind):
                self._observers[kind] = make(here)

    @property
    def saw_workers_at(self) -> float | None:
        """When any of them last had something from the workers themselves."""
        return max((at for each in self._observers.values() if (at := each.saw_workers_at) is not None), default=None)

    def poll(self) -> list[Report]:
        """Return what they tell now."""
        found = []
        for kind, observer in list(self._observers.items()):
            with self._no_harm(kind):
                found.append(self._report(kind, observer.poll()))
        return list(filter(None, found))

    async def before_stop(self, kind: str) -> list[Report]:
        """Have them examine the workers before these are stopped."""
        return await self._told(lambda observer: observer.before_stop(kind))

    async def ended(self) -> list[Report]:
        """Return the last that they tell, when all workers have ended."""
        return await self._told(lambda observer: observer.ended())

    def ask(self, kind: str, data: Plain) -> None:
        """Hand what a command asks to one of them."""
        if kind in self._observers:
            with self._no_harm(kind):
                self._observers[kind].ask(data)

    def close(self) -> None:
        """Release everything."""
        for kind in list(self._observers):
            with self._no_harm(kind):
                self._observers.pop(kind).close()

    async def _told(self, ask: Callable[[Observer], Awaitable[Plain | None]]) -> list[Report]:
        found = []
        for kind, observer in list(self._observers.items()):
            with self._no_harm(kind):
                found.append(self._report(kind, await ask(observer)))
        return list(filter(None, found))

    def _report(self, kind: str, data: Plain | None) -> Report | None:
        return None if data is None else Report(kind, self._here.go.launch, self._here.go.generation, data)

    @contextmanager
    def _no_harm(self, kind: str) -> Iterator[None]:
        """Leave out an observer that raises, and say so."""

        def leave_out(error: Exception) -> None:
            self._here.say(f"this node reports nothing more of its {kind}: {type(error).__name__}: {error}")
            if (observer := self._observers.pop(kind, None)) is not None:
                with harmless():
                    observer.close()

        with harmless(leave_out):
            yield
