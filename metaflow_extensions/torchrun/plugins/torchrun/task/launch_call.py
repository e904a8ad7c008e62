"""One call of `run` in its task: the supervisor runs the launch, and this waits for its end.

Meanwhile it does what only the task can: it stores what the workers have left, and writes to streams that the step's code
has put in the place of stdout and stderr. What interrupts this node the member tells the supervisor. Everything here
belongs to the thread that calls `run`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..compat.datastore import DatastoreValues
from ..errors import LaunchFailed, TorchrunError
from ..events import Event
from ..gang.cause import Cause, Failure, FailureText, failed
from ..gang.messages import CONTROL, Report, Store, Stored, from_wire
from ..gang.policy import Group
from ..gang.wire import Plain, from_plain, to_plain
from ..outputs import Outputs
from ..result import TorchrunResult
from ..supervisor.call import Call, Outcome
from . import console
from .function_call import FunctionCall
from .launch_outputs import PART_BYTES, upload
from .member import Member
from .transfer import Begin, ToTell, Transfer, TransferFailed

_LOOK_S = 0.5  # between two looks at what no frame tells
_STOP_S = 45.0  # what a supervisor may take beyond the workers' grace to stop a launch that is given up


class LaunchCall:
    """One call of `run`, perhaps of a function, which perhaps stores `outputs` in `store`: see `named_outputs`.

    `complete` makes the call anew after its commands, which may have made the entrypoint.
    """

    def __init__(
        self,
        call: Call,
        member: Member,
        complete: Callable[[], Call],
        function: FunctionCall | None = None,
        outputs: tuple[str, ...] | None = None,
        store: DatastoreValues | None = None,
    ) -> None:
        self.call, self._function, self._outputs, self._datastore = call, function, outputs, store
        self._own_outputs: Plain | None = None  # where those are that this node has stored of the last generation
        self._told: Mapping[str, Plain] = {}  # what the launch has left for this node
        self._member, self._link = member, member.link
        self._complete, self._number = complete, -1
        self._verdict: TorchrunError | None = None
        self._end: Mapping[str, Any] | None = None  # what the supervisor has told at the launch's end

    def run(self) -> Outcome:
        """Run the launch to its end on all nodes. Raises the gang's verdict, the same TorchrunError on every node."""
        member = self._member
        self._prepare()
        member.shows_output = self.call.shows_failures
        self._number = member.begin_launch(to_plain(self.call))
        try:
            while self._end is None:
                self._do(*self._next())
            outcome = self._outcome(self._end)
            member.store_now()  # nothing is stored while the step's own code runs
        except BaseException as error:
            try:
                self._give_up(error)
                member.store_now()
            finally:
                member.end_launch(self._verdict, failing=True, handled=self._handled)
            raise
        member.end_launch(None, handled=self._handled)
        return outcome

    @property
    def _handled(self) -> int | None:
        """How many interruptions the launch has handled; None: all, as far as is known."""
        return None if self._end is None else self._end["handled"]

    def _prepare(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # whatever the step's code has put there
                stream.flush()
        writes = tuple(name for name, own in self._link.own_files.items() if console.is_elsewhere(name, own))
        self.call = replace(self.call, writes=writes)

    def _next(self, is_enough: Callable[[], bool] = lambda: False) -> Sequence[Any]:
        """Return the next frame; an empty one when it is enough, or time to look. Raises TorchrunError if none can come."""
        member, frames = self._member, self._member.of_launch
        self._link.wait(lambda: frames or is_enough() or member.is_leaving, _LOOK_S)
        if frames:
            frame = frames.popleft()
            self._take(*frame)
            return frame
        if member.is_leaving:
            raise TorchrunError("The step's code has ended while another thread was still in current.torch.run.")
        if self._link.end is not None:
            self._link.await_end(self.call.grace_s + _STOP_S)
            raise member.broken or TorchrunError("This node's supervisor process has ended.")
        return ("",)

    def _take(self, what: str, *rest: Any) -> None:
        """Do what a frame asks for that may come at any time."""
        if what == "text":
            stream, text, count = rest
            console.write(stream, text)
            self._link.send("wrote", count)
        elif what == "ended" and rest[0] == self._number:
            self._end = rest[1]

    def _do(self, what: str, *rest: Any) -> None:
        if what == "complete":
            self.call = replace(self._complete(), writes=self.call.writes)
            self._link.send("complete", to_plain(self.call))
        elif what == "store" and rest[0] is not None:  # None: what this has begun is no longer wanted
            store = from_wire(rest[0])
            assert isinstance(store, Store)
            self._member.uploads = True
            try:
                self._store(store)
            finally:
                self._member.uploads = False
        elif what == "profile":
            self._store_profile(*rest)

    def _store_profile(self, path: str, asked: str, launch: int, generation: int) -> None:
        """Store a trace when the thread's job before is over, and tell the gang where; the file goes."""
        member, store, before = self._member, self._datastore, self._member.job
        assert store is not None, "commands find a gang in its datastore"

        def do(begin: Begin) -> None:
            if before is not None:
                before.await_end()
            told: Plain = {}
            try:
                with open(path, "rb") as file:
                    begin("a profile", os.fstat(file.fileno()).st_size)
                    told["parts"] = [store.save(data) for data in iter(partial(file.read, PART_BYTES), b"")]
            except Exception as error:
                told["why"] = f"its trace could not be stored in {store.where}: {type(error).__name__}: {error}"
            finally:
                with suppress(OSError):
                    os.unlink(path)
            member.send(Report("answer", launch, generation, {"id": asked, "found": told}))

        with suppress(RuntimeError):  # no more threads
            member.job = Transfer(do, self._link.wake)

    def _place(self, group: Group | None) -> None:
        """Take the place that this node has in the last generation."""
        if group is not None:
            self.call = replace(self.call, group=group)

    def result(self, outcome: Outcome) -> TorchrunResult[Any]:
        """Return the result on this node of a launch that has ended well. Raises LaunchFailed if a part can't be loaded."""
        verdict, call, member = outcome.verdict, self.call, self._member
        fields = _metrics(self._told.get("progress", {}))
        try:
            if self._function is not None:
                fields |= self._function.result(call, self._told.get("functions", {}))
        except TransferFailed as error:
            cause = Cause("store", member.node, member.host, exception=f"has no result: {error}")
            after = f"\nThe workers of launch {verdict.launch} had ended well on all nodes."
            told = failed(LaunchFailed, FailureText(cause, after=after))
            told.events, told.outputs = to_plain(verdict.events), self._stored_outputs
            raise told from error
        return TorchrunResult(
            launch=verdict.launch,
            num_nodes=call.num_nodes,
            node_index=call.node_index,
            nodes=(call.group or Group(call.num_nodes)).nodes,
            nproc_per_node=call.nproc,
            world_size=call.world_size,
            command=outcome.command,
            restarts=list(outcome.restarts),
            duration_s=outcome.duration_s,
            exit_codes=dict(sorted(outcome.exit_codes.items())),
            events=tuple(to_plain(verdict.events)),
            stopped=verdict.stopped,
            goodput=verdict.goodput,
            has_values="values" in fields,
            outputs=self._stored_outputs,
            **fields,
        )

    def original(self, error: LaunchFailed) -> BaseException:
        """Return what `run` raises for the gang's verdict: what the function raised, or the verdict itself."""
        return error if self._function is None else self._function.original(error, self._told.get("functions", {}))

    @property
    def _stored_outputs(self) -> Outputs | None:
        """The files of all nodes that have stored some; on another node its own, or else the control node's."""
        if self._outputs is None or self._datastore is None:
            return None
        nodes = self._told.get("outputs", {}).get("nodes", {})
        known = {int(node): tuple(each) for node, each in nodes.items()}
        if (own := self._own_outputs) is not None and self._member.node != CONTROL:  # of which that alone hears
            known = {self._member.node: (own["key"], own["files"], own["size"])}
        return Outputs(self._datastore.address, known)

    # --- what the workers have left

    def _store(self, asked: Store) -> None:
        """Store what the gang asks for, and tell it; give up when another frame comes."""
        self._place(asked.group)
        member, before = self._member, self._member.job
        parts: dict[str, Callable[[Begin], ToTell]] = {}  # by the kind of their reports
        if self._function is not None and (values := self._function.to_store(self.call, asked.error)) is not None:
            parts["functions"] = values
        if self._outputs and self._datastore is not None:
            parts["outputs"] = partial(upload, self._datastore, self._outputs, self.call.cwd, asked.within_s)
        found, failures = dict[str, ToTell](), tuple[Failure, ...]()

        def do(begin: Begin) -> None:
            if before is not None:
                before.await_end()  # one at a time
            for kind, part in parts.items():
                found[kind] = part(begin)

        if parts:
            storing = Transfer(do, self._link.wake)
            try:
                if not self._await(storing):
                    return
            finally:
                storing.give_up()  # it sends and logs nothing more
            failures = self._tell_end(asked, storing, found.copy())
        member.send(Stored(asked.launch, asked.generation, failures))

    def _await(self, storing: Transfer) -> bool:
        """Wait; return False if the gang goes on without it."""
        while not storing.over:
            frame = self._next(lambda: storing.over)
            if frame[0] in ("store", "complete") or self._end is not None:
                self._member.of_launch.appendleft(frame)
                return False
        return True

    def _tell_end(self, asked: Store, storing: Transfer, found: Mapping[str, ToTell]) -> tuple[Failure, ...]:
        """Tell the log and the gang what it has stored; return why the launch fails without the rest."""
        problem, member = storing.problem(), self._member
        self._own_outputs = found.get("outputs", (None,))[0]
        for kind, (stored, lines) in found.items():
            for line in lines if problem is None else ():
                member.note(line)
            member.send(Report(kind, asked.launch, asked.generation, stored))
        if problem is None:
            return ()
        where = "" if self._datastore is None else self._datastore.where
        text = f"{storing.what} could not be stored in {where} {problem}"
        if asked.error is not None:
            member.note(f"not all that its workers have left is stored: {text}")
            return ()
        cause = Cause("store", member.node, member.host, exception=f"has ended well, but {text}")
        member.say(Event("worker_failed", member.node, f"{cause.who} {cause.what}; stopping all nodes"))
        return (Failure(cause),)

    # --- the end

    def _outcome(self, told: Mapping[str, Any]) -> Outcome:
        if "outcome" not in told:
            if told.get("is_broken") and self._member.broken is not None:
                raise self._member.broken
            error: TorchrunError = from_plain(TorchrunError, told["error"], "the error")
            error.events = told.get("events", [])
            raise error
        outcome: Outcome = from_plain(Outcome, told["outcome"], "the outcome")
        verdict = outcome.verdict
        self._place(verdict.group)
        self._told = verdict.left
        if verdict.error is not None:
            self._verdict = verdict.error
            verdict.error.events, verdict.error.outputs = to_plain(verdict.events), self._stored_outputs
            raise verdict.error
        return outcome

    def _give_up(self, error: BaseException) -> None:
        """Have the supervisor stop everything here, if it has not, and wait for that."""
        if self._end is None:
            cause = None if self._member.gang_knows(error) else self._member.cause_of(error)
            self._link.send("give_up", self._number, None if cause is None else to_plain(cause))
        frames, deadline = self._member.of_launch, time.monotonic() + self.call.grace_s + _STOP_S
        while self._end is None and self._link.end is None and (left_s := deadline - time.monotonic()) > 0:
            if self._link.wait(lambda: frames, left_s):
                self._take(*frames.popleft())


def _metrics(told: Plain) -> dict[str, Any]:
    """Return rank 0's last values, and their curves; what is no number came as None, since JSON has no NaN."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    last, history = told.get("last", {}), told.get("history", {})
    curves = {key: [(step, number(value)) for step, value in points] for key, points in history.items()}
    return {"metrics": {key: number(value) for key, value in last.items()}, "history": curves}
