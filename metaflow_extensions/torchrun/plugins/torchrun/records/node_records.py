"""Records of one member, made on that node from its own messages. Pure.

The control node's history has all nodes. A member's card needs only its own node, so it asks no other node.
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
from .snapshot import MAX_MESSAGE, Snapshot

_KINDS: dict[type[Message], str] = {Started: "started", Wrote: "output", Done: "finished"}


class NodeRecords:
    """The history of one node. Its lock lets the step's code, the channel's thread and a card's thread use it."""

    def __init__(
        self,
        node: int,
        about: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        keepers: Keepers | None = None,  # of the features, for this node alone
    ) -> None:
        self._node = node
        self._about = about  # what else a snapshot has, as plain data; other threads may add to it
        # An RLock: a signal handler may send a message, and acquire it while the main thread holds it.
        self._lock = threading.RLock()
        self._clock, self._began_at = clock, clock()
        self._history = History(clock)
        self._keepers = keepers or Keepers()
        self._ready: Ready | None = None  # the last one
        self._generation: int | None = None  # the last one that has started
        self._error: str | None = None
        self._cause: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """The number of records."""
        return self._history.count

    def joined(self, host: str) -> None:
        """Record that the node is a member."""
        with self._lock:
            self._note("joined", text=host)

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the node's step, unless an error is recorded already."""
        with self._lock:
            if self._error is None:
                self._fail("broken", error)

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the node now; any thread may call this."""
        with self._lock:
            return Snapshot(
                num_nodes=1,
                nproc_per_node=self._ready.nproc if self._ready else None,
                cause=self._cause,
                error=self._error,
                facts=dict(self._ready.facts) if self._ready else {},
                events=self._history.records,
                reports=self._history.reports,
                node=self._node,
                features=self._keepers.record(),
                **dict(self._about),
            )

    def handle(self, message: Message) -> None:
        """Record a message that the node has sent or received."""
        with self._lock:
            self._handle(message)

    # --- with the lock

    def _handle(self, message: Message) -> None:
        here = {name: getattr(message, name, None) for name in ("launch", "generation")}
        match message:
            case Ready():
                self._ready = message
                self._error = self._cause = None
                self._note("ready", **here)
            case Go():
                self._generation = message.generation
                self._keepers.begin(message.launch, {}, self._clock() - self._began_at)
                runs = self._ready.runs if self._ready else WORKERS
                self._note("go" if runs == WORKERS else runs, node=None, **here)
            case Started() | Wrote() | Done():
                self._note(_KINDS[type(message)], **here)
            case Told():
                self._keep(message)
            case Stop():
                self._note("stopping", node=None, text=message.because, **here)
            case Ended():
                for rank, code in message.exit_codes.items():
                    self._note("exited", rank=rank, exit_code=code, text=describe_exit(code), **here)
                self._note("stopped", **here)
            case Restart():
                self._restart(message)
            case Verdict(error=None):
                self._note("done", node=None, **here)
            case Verdict(error=TorchrunError() as error):
                self._fail("failed", error, message.launch)
            case Abort():
                self._fail("broken", message.error)
            case Leave():
                self._note("left", text="its step has failed" if message.failed else "")

    def _note(self, kind: str, **facts: Any) -> None:
        self._history.note(kind, **{"node": self._node, **facts})

    def _keep(self, told: Told) -> None:
        self._keepers.handle(self._node, told, self._clock() - self._began_at)
        for remarks in self._keepers.pop_remarks():
            for each in remarks.happened:
                self._note(**asdict(each), launch=told.launch, generation=told.generation)

    def _restart(self, restart: Restart) -> None:
        cause, launch = restart.cause, restart.launch
        self._note_cause(cause, launch)
        self._history.report(None, cause.describe(), cause.as_dict(), launch, self._generation)
        text = f"restart {restart.number} of {restart.of} in {restart.pause_s:g} s"
        self._note("restart", node=None, launch=launch, text=text)

    def _fail(self, kind: str, error: BaseException, launch: int | None = None) -> None:
        text = str(error) or type(error).__name__
        cause = error.cause if isinstance(error, TorchrunError) else None
        if cause is not None:
            self._note_cause(Cause.from_dict(cause), launch)
        self._error, self._cause = text[:MAX_MESSAGE], cause
        self._history.report(type(error).__name__, text, cause, launch, self._generation)
        self._note(kind, node=None, launch=launch, text=text.partition("\n")[0])

    def _note_cause(self, cause: Cause, launch: int | None) -> None:
        rank = cause.rank if cause.node == self._node else None
        text = cause.describe().partition("\n")[0].removesuffix(".")
        where = {"launch": launch, "generation": self._generation, "rank": rank}
        self._note("cause", exit_code=cause.exit_code, text=text, **where)
