"""What has happened to one member, as it knows itself from its messages: records of its node, as if it were alone. Pure.

The control node's history has all nodes. A member's own card needs one, and asks nobody for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import TorchrunError
from ..gang.cause import Cause, describe_exit
from ..gang.history import History
from ..gang.keepers import Keepers
from ..gang.protocol import (
    WORKERS,
    Abort,
    Done,
    Ended,
    Go,
    Leave,
    Message,
    Ready,
    Restart,
    Started,
    Stop,
    Told,
    Verdict,
    Wrote,
)
from .snapshot import Snapshot

_MAX_MESSAGE = 8 * 1024


class NodeRecords:
    """The history of one node; the step's code, the channel's thread and a card's may use it at the same time."""

    def __init__(
        self,
        node: int,
        about: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        keepers: Keepers | None = None,  # of the features, for this node alone
    ) -> None:
        self._node = node
        self._about = about  # what else is known, as plain data; other threads may add to it
        # A handler of a signal may send, and so come here, while the main thread has it.
        self._lock = threading.RLock()
        self._clock, self._began_at = clock, clock()
        self._history = History(clock)
        self._keepers = keepers or Keepers()
        self._nproc: int | None = None
        self._runs = WORKERS
        self._facts: dict[str, str] = {}
        self._error: str | None = None
        self._cause: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """How many things have happened."""
        return self._history.count

    def joined(self, host: str) -> None:
        """Take note that the gang has taken the node in."""
        with self._lock:
            self._note("joined", text=host)

    def failed(self, error: BaseException) -> None:
        """Take note of what ends the node's step, if it was not the gang that said so."""
        with self._lock:
            if self._error is None:
                text = str(error) or type(error).__name__
                self._fail("broken", text, error.cause if isinstance(error, TorchrunError) else None)

    def handle(self, message: Message) -> None:
        """Record a message that the node has sent or got."""
        handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
        if handler is not None:
            with self._lock:
                handler(message)

    def snapshot(self) -> Snapshot:
        """Return what is known of the node now; any thread may ask."""
        with self._lock:
            return Snapshot(
                num_nodes=1,
                nproc_per_node=self._nproc,
                cause=self._cause,
                error=self._error,
                facts=self._facts,
                events=self._history.records,
                reports=self._history.reports,
                node=self._node,
                features=self._keepers.record(),
                **dict(self._about),
            )

    # --- with the lock

    def _note(self, kind: Any, **facts: Any) -> None:
        self._history.note(kind, **{"node": self._node, **facts})

    def _on_ready(self, ready: Ready) -> None:
        self._nproc, self._facts, self._runs = ready.nproc, dict(ready.facts), ready.runs
        self._error = self._cause = None
        self._note("ready", launch=ready.launch)

    def _on_go(self, go: Go) -> None:
        self._keepers.begin(go.launch, {}, self._clock() - self._began_at)
        self._note("go" if self._runs == WORKERS else self._runs, node=None, launch=go.launch, generation=go.generation)

    def _on_started(self, started: Started) -> None:
        self._note("started", launch=started.launch, generation=started.generation)

    def _on_wrote(self, wrote: Wrote) -> None:
        self._note("output", launch=wrote.launch, generation=wrote.generation)

    def _on_told(self, told: Told) -> None:
        self._keepers.handle(self._node, told, self._clock() - self._began_at)
        for remarks in self._keepers.pop_remarks():
            for each in remarks.happened:
                self._note(**asdict(each), launch=told.launch, generation=told.generation)

    def _on_stop(self, stop: Stop) -> None:
        self._note("stopping", node=None, launch=stop.launch, generation=stop.generation, text=stop.because)

    def _on_ended(self, ended: Ended) -> None:
        here = {"launch": ended.launch, "generation": ended.generation}
        for rank, code in ended.exit_codes.items():
            self._note("exited", rank=rank, exit_code=code, text=describe_exit(code), **here)
        self._note("stopped", **here)

    def _on_restart(self, restart: Restart) -> None:
        cause = restart.cause
        self._note_cause(cause, restart.launch)
        self._history.report(None, cause.describe(), cause.as_dict(), restart.launch, None)
        text = f"restart {restart.number} of {restart.of} in {restart.pause_s:g} s"
        self._note("restart", node=None, launch=restart.launch, text=text)

    def _note_cause(self, cause: Cause, launch: int | None) -> None:
        last = next((record for record in reversed(self._history.records) if record.kind in ("go", "before_run")), None)
        rank = cause.rank if cause.node == self._node else None
        text = cause.describe().partition("\n")[0].removesuffix(".")
        generation = None if last is None else last.generation
        self._note("cause", launch=launch, generation=generation, rank=rank, exit_code=cause.exit_code, text=text)

    def _on_verdict(self, verdict: Verdict) -> None:
        if verdict.error is None:
            self._note("done", node=None, launch=verdict.launch)
        else:
            self._fail("failed", verdict.error.message, verdict.error.cause, verdict.launch)

    def _on_abort(self, abort: Abort) -> None:
        self._fail("broken", abort.error.message, abort.error.cause)

    def _fail(self, kind: str, text: str, cause: dict[str, Any] | None, launch: int | None = None) -> None:
        if cause is not None:
            self._note_cause(Cause.from_dict(cause), launch)
        self._error, self._cause = text[:_MAX_MESSAGE], cause
        self._note(kind, node=None, launch=launch, text=text.partition("\n")[0])

    def _on_done(self, done: Done) -> None:
        self._note("finished")

    def _on_leave(self, leave: Leave) -> None:
        self._note("left", text="its step has failed" if leave.failed else "")
