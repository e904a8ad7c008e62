"""Jobs for the datastore, in a thread, so that the node still handles its gang's messages: one at a time in a task."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# How long one thing may take: a quarter of an hour, in which a store's service can restart, and the time that its size
# needs at a rate that every network has. Metaflow's own S3 client would go on for over an hour (2.19).
PATIENCE_S = 900.0
_SLOWEST_BYTES_PER_S = 1e6
REMIND_S = 30.0  # how often a node's log says what takes so long
_LOOK_S = 0.5


class TransferFailed(Exception):
    """The datastore failed or was too slow; the text says what, where, how long and why."""


@dataclass(frozen=True)
class Step:
    """One thing to store or to load."""

    what: str
    do: Callable[[], object]  # stores or loads it; the return value is ignored
    patience_s: float


@dataclass(frozen=True)
class ToStore:
    """What is stored of a launch when all workers of the gang have ended.

    The transfer's thread asks for each step and does it, one after the other. The steps fill the rest.
    """

    steps: Iterator[Step]
    stored: dict[str, Any] = field(default_factory=dict)  # what the gang is told at the end
    lines: list[str] = field(default_factory=list)  # for this node's log, when all is stored


class Transfer:
    """Steps, one after the other, in a daemon thread that begins at once: only that waits for the store, and no exit for it.

    It writes `step`, `_step_begun_at` and `_error`, and sets `_ended` last; who has made it reads them. Each field has
    one writer, so there is no lock. Raises RuntimeError if there are no more threads.
    """

    def __init__(self, where: str, doing: str, steps: Iterable[Step], wake: Callable[[], object] = bool) -> None:
        self._where, self._doing = where, doing  # the datastore's name and place; "stores" or "loads"
        self._wake = wake  # called at the end
        self._steps = iter(steps)  # at least one; the others are made as they are needed
        self.step = next(self._steps)  # the current or last step
        self._begun_at = self._step_begun_at = self._said_at = time.monotonic()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._given_up = False
        threading.Thread(target=self._run, name="torchrun-values", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether its thread still runs."""
        return not self._ended.is_set()

    @property
    def over(self) -> bool:
        """Whether it has succeeded, failed, or takes too long."""
        return not self.hangs or time.monotonic() > self._step_begun_at + self.step.patience_s

    def line(self) -> str | None:
        """Return a line for the log about the progress; None if the last one is less than `REMIND_S` old."""
        now = time.monotonic()
        if now - self._said_at < REMIND_S:
            return None
        self._said_at = now
        return f"{self._doing} {self.step.what}, for {now - self._begun_at:.0f} s so far"

    def problem(self) -> str | None:
        """Return why it failed, once it is over; None if it succeeded."""
        passed = f"after {time.monotonic() - self._step_begun_at:.0f} s"
        if self._error is not None:
            return f"{passed}: {type(self._error).__name__}: {self._error}"
        return f"{passed}: it has not answered, or is too slow" if self.hangs else None

    def give_up(self) -> None:
        """Do no further step; the current one may go on."""
        self._given_up = True

    def await_end(self, say: Callable[[str], object] = bool) -> None:
        """Wait until it is over; `say` now and then what takes so long."""
        try:
            while not self._ended.wait(_LOOK_S) and not self.over:  # signal handlers run meanwhile
                if (line := self.line()) is not None:
                    say(line)
        finally:
            self.give_up()

    def wait(self, say: Callable[[str], object] = bool) -> None:
        """Wait for its end, or raise TransferFailed; `say` as in `await_end`."""
        self.await_end(say)
        if (problem := self.problem()) is not None:
            raise TransferFailed(f"{self.step.what} could not be loaded from {self._where} {problem}") from self._error

    def _run(self) -> None:
        try:
            for step in itertools.chain([self.step], self._steps):
                if self._given_up:
                    return
                self._step_begun_at, self.step = time.monotonic(), step  # in this order: see `over`
                step.do()
        except BaseException as error:  # a store's client can raise anything
            self._error = error
        finally:
            self._ended.set()
            self._wake()


def job(do: Callable[[], object], patience_s: float, wake: Callable[[], object] = bool) -> Transfer:
    """Begin one thing, of which nothing is said."""
    return Transfer("", "does", [Step("a job", do, patience_s)], wake)


def do_within(do: Callable[[], object], patience_s: float) -> None:
    """Do one thing that may fail and may hang, as well as it goes, and wait for its end so long."""
    with suppress(RuntimeError):
        job(do, patience_s).await_end()


def patience_for(size: int) -> float:
    """Return how many seconds `size` bytes may take."""
    return PATIENCE_S + size / _SLOWEST_BYTES_PER_S
