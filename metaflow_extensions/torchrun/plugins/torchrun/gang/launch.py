"""One launch as the control node knows it: data, without what follows from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import TorchrunError
from .cause import Cause, Failure, first_failure
from .limits import ALIKE_ENDS, ALIKE_S
from .messages import Ended, Ready
from .policy import Group, LaunchPolicy

# What an agent prints when its store can't listen (TCPStore, torch 2.13).
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_MAX_MOVES = 3
GONE = frozenset({"node_lost", "preempted"})
"""The classes of causes with which a node is gone, or about to go."""


@dataclass
class Launch:
    """One launch; all times are seconds of the gang's clock."""

    number: int
    control: Ready = field(default_factory=lambda: Ready(-1, 0))  # the control node's call
    generation: int = -1  # none has begun
    group: Group = field(default_factory=lambda: Group(0))  # the nodes of this generation; before the first, none
    moves: int = 0  # restarts because another program took the port
    uncounted: int = 0  # restarts that `max_restarts` does not count: those, and after a node was told to end
    went_at: float = 0.0
    active_at: float = 0.0  # when a rank has shown its last sign of life, or else when they were started
    has_begun: bool = False  # whether any rank has shown one
    is_silent: bool = True  # whether no rank has written anything in any generation, and no line says so
    until: float = float("inf")  # when the present phase must be over, in STOPPING and after a failure STORING
    running: set[int] = field(default_factory=set)  # nodes of this generation whose workers may run
    starting: set[int] = field(default_factory=set)  # those of them whose workers do not all run yet
    ended: dict[int, Ended] = field(default_factory=dict)  # without what failed, of which `first` is kept
    fails: bool = False  # whether this generation does, or what it has left can't be stored
    first: Failure | None = None  # the first failure of this generation; its age is as of the clock's zero
    given_up: set[int] = field(default_factory=set)  # nodes whose own code has ended their call of `run`
    leaving: dict[int, Cause] = field(default_factory=dict)  # nodes that were told to end
    tasks: dict[int, str] = field(default_factory=dict)  # of this generation, by node
    restarts_for: Cause | None = None  # why the last restart follows
    again: str = ""  # the same for the log, and how often that may be
    repeats: tuple[object, int] = (None, 0)  # how the last generations have failed, and how many in a row did
    values: dict[str, str] = field(default_factory=dict)  # by rank: the keys of stored values and exceptions
    stores: set[int] = field(default_factory=set)  # while STORING: the nodes that still store something
    failing_with: TorchrunError | None = None  # while STORING: the error it will end with
    told: set[int] = field(default_factory=set)  # the nodes that have heard the verdict
    verdict: TorchrunError | None = None  # the error at its end; None while it runs, or if it succeeded

    def begin_generation(self, now: float, group: Group, tasks: dict[int, str]) -> None:
        """Begin a generation: forget the ends and failures of the one before."""
        self.went_at, self.group, self.tasks, self.running, self.starting = now, group, tasks, set(tasks), set(tasks)
        self.generation, self.active_at, self.has_begun, self.until = self.generation + 1, now, False, float("inf")
        self.forget_failures()
        for each in (self.ended, self.stores, self.values):
            each.clear()

    @property
    def policy(self) -> LaunchPolicy:
        """Limits and restarts."""
        return self.control.policy or LaunchPolicy()

    @property
    def limit(self) -> int:
        """How many restarts there may be, with those that do not count."""
        return self.policy.max_restarts + self.uncounted

    def has_restarts_left(self, cause: Cause) -> bool:
        """Return whether `max_restarts` allows one more; a preemption uses none up, but there must be some at all."""
        return self.generation < self.limit or (cause.category == "preempted" and self.policy.max_restarts > 0)

    def takes_part(self, node: int) -> bool:
        """Return whether a node belongs to this generation."""
        return self.group.rank_of(node) is not None

    @property
    def is_stopped(self) -> bool:
        """Whether ranks have stopped because a command said so."""
        return any(ended.stopped for ended in self.ended.values())

    # --- failures ---------------------------------------------------------------------------------

    def add_failures(self, failures: Iterable[Failure], now: float) -> None:
        """Keep the first failure and the preemptions only: thousands of texts would take hundreds of megabytes."""
        for each in failures:
            self.fails, dated = True, Failure(each.cause, each.age_s - now)
            self.first = dated if self.first is None else first_failure((self.first, dated))
            if each.cause.category == "preempted":
                self.leaving[each.cause.node] = each.cause

    def forget_failures(self) -> None:
        """Forget those that are dealt with: what fails from now on is another cause."""
        self.fails, self.first = False, None

    @property
    def cause(self) -> Cause | None:
        """The first failure of this generation, or None."""
        return None if self.first is None else self.first.cause

    def has_lost_its_port(self) -> bool:
        """Return whether another program took the chosen port before the agent did, and another may be chosen."""
        cause = self.cause
        taken = cause is not None and cause.kind == "agent" and _PORT_TAKEN.search(cause.detail) is not None
        return taken and self.control.master_port is None and self.moves < _MAX_MOVES

    def repeat(self, now: float) -> bool:
        """Count how often in a row the user's code has failed in the same way soon after its start; return if too often."""
        cause, way = self.cause, None
        if cause is not None and cause.category == "user" and now - self.went_at < ALIKE_S:
            kind = (cause.exception or "").partition(":")[0]
            way = (cause.kind, kind, cause.place, None if kind else cause.exit_code)
        self.repeats = (way, self.repeats[1] + 1 if way is not None and way == self.repeats[0] else 1)
        return way is not None and self.repeats[1] >= ALIKE_ENDS
