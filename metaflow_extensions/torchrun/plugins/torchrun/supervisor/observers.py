"""What a node observes of its workers while a generation runs, and tells the gang.

No observer decides anything: one that raises ends no launch. A line in the log's details says so once, and it is left out
of this generation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..compat.renamed import harmless
from ..events import Event
from ..gang.messages import Go, Report
from ..gang.wire import Plain
from .agent import AgentProcess
from .call import Call
from .exits import Exits
from .pipes import LogReader
from .seat import Seat


@dataclass(frozen=True)
class Here:
    """One generation on this node, as its observers see it."""

    call: Call
    go: Go
    seat: Seat
    folder: str  # torchrun's --log-dir
    agent: AgentProcess
    logs: LogReader
    exits: Exits  # the workers

    def say(self, text: str, is_detail: bool = True) -> None:
        """Write lines to the log, or to its details."""
        self.seat.emit(Event("note", self.seat.node, text, is_detail))

    @property
    def last_sign_at(self) -> float | None:
        """When a worker was last found to have written, reported or ended."""
        signs = (self.logs.last_output_at, self.exits.reported_at, self.exits.ended_at)
        return max((at for at in signs if at is not None), default=None)


class Observer(Protocol):
    """Observes one generation. It shares the supervisor's loop, so nothing here may wait for long."""

    def poll(self) -> Plain | None:
        """Return the data to send now; called at least twice a second, so mostly None."""


class Observers:
    """The observers of one generation, by the kind of report that each sends."""

    def __init__(self, here: Here, makers: Mapping[str, Callable[[Here], Observer]]) -> None:
        self._here = here
        self._observers: dict[str, Any] = {}
        for kind, make in makers.items():
            with harmless(partial(self._leave_out, kind)):
                self._observers[kind] = make(here)

    def poll(self) -> list[Report]:
        """Return what they report now."""
        found = list[Report]()
        for kind, observer in list(self._observers.items()):
            with harmless(partial(self._leave_out, kind)):
                found += self._reports(kind, observer.poll())
        return found

    async def ask(self, kind: str, question: Callable[[Any], Awaitable[Plain | None]]) -> list[Report]:
        """Ask one of them; return its report."""
        found = list[Report]()
        if kind in self._observers:
            with harmless(partial(self._leave_out, kind)):
                found += self._reports(kind, await question(self._observers[kind]))
        return found

    def _reports(self, kind: str, data: Plain | None) -> list[Report]:
        return [] if data is None else [Report(kind, self._here.go.launch, self._here.go.generation, data)]

    def _leave_out(self, kind: str, error: Exception) -> None:
        self._here.say(f"this node reports nothing more of its {kind}: {type(error).__name__}: {error}")
        self._observers.pop(kind, None)
