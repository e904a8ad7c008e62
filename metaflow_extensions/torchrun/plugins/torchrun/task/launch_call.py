"""One call of `run` in its task: the supervisor runs the launch, and this waits for its end.

Meanwhile it does what only the task can: it stores what the workers have left, and writes to streams that the step's code
has put in the place of stdout and stderr. What interrupts this node the member tells the supervisor. Everything here
belongs to the thread that calls `run`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import TorchrunError
from ..gang.group import Group
from ..gang.messages import Store, from_wire
from ..gang.view import as_dicts
from ..gang.wire import Plain, from_plain, to_plain
from ..launch.call import Call, Outcome
from ..launch.transfer import ValueStore
from . import console
from .member import Member
from .services import Services
from .upload import Upload, begin_upload

_LOOK_S = 0.5  # between two looks at what no frame tells
_LAST_NEWS_S = 0.5  # how long to wait for the gang's own error when the supervisor is gone
_OWN_LINES_S = 1.0  # for what the task has written before, so that it stands before what the workers write
_STOP_S = 45.0  # what a supervisor may take beyond the workers' grace to stop a launch that is given up


class LaunchCall:
    """One call of `run`; `complete` makes the call anew after its commands, which may have made the entrypoint."""

    def __init__(
        self,
        call: Call,
        member: Member,
        services: Services,
        store: ValueStore | None,
        complete: Callable[[], Call],
    ) -> None:
        self.call, self.services = call, services
        self.told: Mapping[str, Plain] = {}  # what the launch has left for this node
        self._member, self._link = member, member.link
        self._store, self._complete = store, complete
        self._number = -1
        self._to_store: Store | None = None  # until its upload begins
        self._upload: Upload | None = None  # until all is stored
        self._stored = 0  # the generation of the last upload
        self._verdict: TorchrunError | None = None
        self._runs = False  # from *run* to *ended*
        self._handled: int | None = 0  # how many interruptions the launch has handled; None: all, as far as is known

    def run(self) -> Outcome:
        """Run the launch to its end on all nodes. Raises the gang's verdict, the same TorchrunError on every node."""
        self._number = self._member.begin_launch(self.call.shows_failures)
        try:
            self._begin()
            while (outcome := self._next()) is None:
                self._poll()
            self._member.store_now()  # nothing is stored while the step's own code runs
        except BaseException as error:
            try:
                self._give_up(error)
                self._member.store_now()
            finally:
                self._member.end_launch(self._verdict, failing=True, handled=self._handled)
            raise
        self._member.end_launch(None, handled=self._handled)
        return outcome

    def settle(self, patience_s: float | None = None) -> None:
        """Wait until all lines of the launch are written, or for so long."""
        self._link.settle(patience_s)

    def _begin(self) -> None:
        self.services.begin(self.call)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # whatever the step's code has put there
                stream.flush()
        writes = tuple(name for name, own in self._link.own_files.items() if console.is_elsewhere(name, own))
        self.call = replace(self.call, writes=writes)
        self._runs, self._handled = True, None
        self._link.send("run", self._number, to_plain(self.call))
        self._member.has_begun()

    def _next(self) -> Outcome | None:
        """Wait for what the supervisor says, and handle it; return the outcome, if that is it."""
        frames = self._member.of_launch
        files = () if self._upload is None else (self._upload.transfer.file,)

        def has_news() -> bool:
            return bool(frames) or self._member.is_leaving or (self._to_store is not None and not self._member.has_job)

        self._link.wait(has_news, _LOOK_S, files)
        outcome = None
        while frames and outcome is None:
            outcome = self._handle(*frames.popleft())
        return outcome

    def _poll(self) -> None:
        if self._upload is not None and self._upload.poll():
            self._give_up_upload()
        if self._member.is_leaving:
            raise TorchrunError("The step's code has ended while another thread was still in current.torch.run.")
        if self._to_store is not None and not self._member.has_job:  # one at a time
            store, self._to_store = self._to_store, None
            self._upload = begin_upload(store, self.services, self._store, self.call.ranks[0], self._member)
            self._member.uploads = self._upload is not None
        if self._link.end is not None:
            self._lose_supervisor()

    def _handle(self, what: str, *rest: Any) -> Outcome | None:
        if what == "text":
            self._write(*rest)
        elif what == "complete":
            self.call = replace(self._complete(), writes=self.call.writes)
            self._link.send("complete", to_plain(self.call))
        elif what == "store":
            self._on_store(rest[0])
        elif what == "ended" and rest[0] == self._number:
            return self._ended(rest[1])
        return None

    def _write(self, stream: str, text: str, count: int) -> None:
        console.write(stream, text)
        self._link.send("wrote", count)

    def _on_store(self, wire: Any) -> None:
        self._give_up_upload()
        if wire is not None:
            store = from_wire(wire)
            assert isinstance(store, Store)
            is_moved = self._place(store.group)
            if is_moved or store.generation != self._stored:
                self.services.begin(self.call)  # they may have stored what another generation had left
            self._stored, self._to_store, self._member.uploads = store.generation, store, True

    def _place(self, group: Group | None) -> bool:
        """Take the place that this node has in the last generation; return whether it had another one before."""
        before = self.call
        if group is not None:
            self.call = replace(before, group=group)
        return self.call != before

    def _give_up_upload(self) -> None:
        if self._upload is not None:
            self._upload.transfer.give_up()  # it sends and logs nothing more
        self._upload = self._to_store = None
        self._member.uploads = False

    # --- the end

    def _ended(self, told: Mapping[str, Any]) -> Outcome:
        self._runs, self._handled = False, told["handled"]
        if "outcome" not in told:
            self._raise_error(told)
        outcome: Outcome = from_plain(Outcome, told["outcome"], "the outcome")
        verdict = outcome.verdict
        if self._place(verdict.group):
            self.services.begin(self.call)
        self.told = verdict.left
        if verdict.error is not None:
            self._verdict = verdict.error
            verdict.error.events = as_dicts(verdict.events)
            self.services.failed(verdict.error, self.told)
            raise verdict.error
        return outcome

    def _raise_error(self, told: Mapping[str, Any]) -> None:
        if told.get("is_broken") and self._member.broken is not None:
            raise self._member.broken
        if "error" not in told:  # this task was stopped for so long that the gang goes on without it
            self._member.await_error(_LAST_NEWS_S)
            raise TorchrunError("This node's supervisor has ended the launch here: the gang goes on without this task.")
        error: TorchrunError = from_plain(TorchrunError, told["error"], "the error")
        error.events = told.get("events", [])
        raise error

    def _lose_supervisor(self) -> None:
        self._runs = False
        self._link.await_end(self.call.grace_s + _STOP_S)
        self._member.await_error(_LAST_NEWS_S)
        raise TorchrunError("This node's supervisor process has ended.")

    def _give_up(self, error: BaseException) -> None:
        """Have the supervisor stop everything here, if it has not, and wait for that."""
        self._give_up_upload()
        if not self._runs:
            return
        cause = None if self._member.gang_knows(error) else self._member.cause_of(error)
        self._link.send("give_up", self._number, None if cause is None else to_plain(cause))
        deadline, frames = time.monotonic() + self.call.grace_s + _STOP_S, self._member.of_launch
        while self._runs and self._link.end is None and time.monotonic() < deadline:
            self._link.wait(lambda: frames, deadline - time.monotonic())
            while frames:
                what, *rest = frames.popleft()
                if what == "text":
                    self._write(*rest)
                elif what == "ended" and rest[0] == self._number:
                    self._runs, self._handled = False, rest[1]["handled"]
