"""Jobs for the datastore, in a thread, so that the node still handles its gang's messages: one at a time in a task."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

# How long one thing may take: a quarter of an hour, in which a store's service can restart, and the time that its size
# needs at a rate that every network has. Metaflow's own S3 client would go on for over an hour (2.19).
PATIENCE_S = 900.0
_SLOWEST_BYTES_PER_S = 1e6
_LOOK_S = 0.5

Begin: TypeAlias = Callable[..., None]
"""`Transfer.begin`: what a job calls before each thing that it stores or loads."""

ToTell: TypeAlias = tuple[dict[str, Any], list[str]]
"""What a job that has stored something tells the gang, and lines for this node's log."""


class TransferFailed(Exception):
    """The datastore failed or was too slow; the text says what, where, how long and why."""


class Transfer:
    """A job in a daemon thread that begins at once: only that waits for the store, and no exit for it.

    It writes `what`, `_step_begun_at`, `_patience_s` and `_error`, and sets `_ended` last; who has made it reads them. Each
    field has one writer, so there is no lock. Raises RuntimeError if there are no more threads.
    """

    def __init__(
        self,
        do: Callable[[Begin], object],
        wake: Callable[[], object] = bool,  # called at the end
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._do, self._wake = do, wake
        self.what, self._patience_s = "", patience_s  # of what it does now, or did last
        self._step_begun_at = time.monotonic()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._given_up = False
        threading.Thread(target=self._run, name="torchrun-values", daemon=True).start()

    def begin(self, what: str, size: int = 0, patience_s: float = PATIENCE_S) -> None:
        """Go on with the next thing, of so many bytes, or end if this was given up; for the job itself."""
        if self._given_up:
            raise TransferFailed("it was given up")
        self._step_begun_at = time.monotonic()  # first: see `over`
        self._patience_s, self.what = patience_s + size / _SLOWEST_BYTES_PER_S, what

    @property
    def hangs(self) -> bool:
        """Whether its thread still runs."""
        return not self._ended.is_set()

    @property
    def over(self) -> bool:
        """Whether it has succeeded, failed, or takes too long."""
        return not self.hangs or time.monotonic() > self._step_begun_at + self._patience_s

    def problem(self) -> str | None:
        """Return why it failed, once it is over; None if it succeeded."""
        passed = f"after {time.monotonic() - self._step_begun_at:.0f} s"
        if self._error is not None:
            return f"{passed}: {type(self._error).__name__}: {self._error}"
        return f"{passed}: it has not answered, or is too slow" if self.hangs else None

    def give_up(self) -> None:
        """Begin nothing more; what it does now may go on."""
        self._given_up = True

    def await_end(self) -> None:
        """Wait until it is over."""
        try:
            while not self._ended.wait(_LOOK_S) and not self.over:  # signal handlers run meanwhile
                pass
        finally:
            self.give_up()

    def _run(self) -> None:
        try:
            self._do(self.begin)
        except BaseException as error:  # a store's client can raise anything
            self._error = error
        finally:
            self._ended.set()
            self._wake()


def do_within(do: Callable[[], object], patience_s: float) -> None:
    """Do one thing that may fail and may hang, as well as it goes, and wait for its end so long."""
    with suppress(RuntimeError):
        Transfer(lambda _: do(), patience_s=patience_s).await_end()
