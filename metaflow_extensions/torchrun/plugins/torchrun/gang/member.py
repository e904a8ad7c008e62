"""A node as a member of its gang, from the step's begin to its end.

It holds the channel and numbers the launches. News of the gang must reach the step's code wherever that is: inside of
`run` it arrives as a message, outside of it as an exception in the main thread (see `wakeup`).

Who may touch what. Three kinds of threads meet here: those of the step's code, which call `run`; the channel's thread,
which calls `deliver` and `lose_control`; and watching threads, which call `notice`. Handlers of signals interrupt the
main thread. All state changes under `_lock`. No thread waits while it holds the lock, except in `_wait`, which releases it.

- In the handler of SIGTERM only `record_sigterm` runs. It takes no lock: it reads, and adds to `_sigterms`, a deque.
- In the handlers of the wake signal and of the alarm, `raise_news` and `time_out` run. They take the lock, even where
  they have interrupted the main thread while that holds it. That is safe, because they either leave the state alone or
  raise, so that what they have interrupted does not go on.
- In a forked child nothing works. The lock may be held there for ever by a thread that was not forked, so every
  method checks `in_task` before it takes the lock.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import GangError, LaunchFailed, LaunchTimeout, TorchrunError, TorchrunPreempted, chain
from ..events import Event, Subscriber
from ..tracebacks import user_traceback, words_of
from .cause import Cause, FailureText, cause_of, failed
from .endings import Interruption, TimedOut, lost_control, preempted, timed_out
from .protocol import CONTROL, Abort, Ack, Alone, Bye, Done, Leave, Message, Replaced, TaskLink, Welcome
from .texts import QUIET_S, REMIND_S, names
from .wakeup import NEXT, OVER, ControlNode, State, Wakeup

# How long a leaving node waits for the control node's receipt (*ack*).
_ACK_WAIT_S = 5.0
_SIGTERM_CAME = "its Metaflow task got SIGTERM"


_SAYS: dict[type, ControlNode] = {Welcome: ControlNode.HERE, Ack: ControlNode.ACKNOWLEDGED, Bye: ControlNode.BYE}


class Member:
    """One node in its gang."""

    def __init__(self, node: int, num_nodes: int, emit: Subscriber) -> None:
        self.node, self.num_nodes, self.emit = node, num_nodes, emit
        self.host = socket.gethostname()
        # Of the current launch; each launch has its own. A SimpleQueue, since signal handlers put into it: its `put` may
        # interrupt itself (CPython's C code), where that of `queue.Queue` would wait for its own lock for ever.
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.shows_output = True  # whether the last launch shows everything that a failing worker writes
        self._link: TaskLink | None = None
        self._at_end: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._lock = threading.RLock()  # an RLock: a signal handler may take it while the main thread holds it
        self._changed = threading.Condition(self._lock)
        self._wakeup = Wakeup(self, self._lock)
        self._state = State.STEP
        self._control = ControlNode.UNKNOWN
        self._launches = 0
        self._sigterms: deque[str] = deque()  # SIGTERMs that `raise_news` has not handled
        self._order: str | None = None  # why this node must end, if it must
        self.broken: TorchrunError | None = None  # why the gang can't go on; other threads may read it without the lock
        self._lost: TorchrunError | None = None  # the loss of the control node, which that node may not know of
        self._verdict: TorchrunError | None = None  # of the last launch

    def attach(self, link: TaskLink, at_end: Callable[[], None] = lambda: None) -> None:
        """Begin to use `link`; `deliver` must get its messages from now on.

        `at_end` is called when the node has left, before the link closes.
        """
        self._link, self._at_end = link, at_end
        self._wakeup.set_handlers()

    @property
    def in_task(self) -> bool:
        """Whether this is the task's own process, not a fork of it."""
        return os.getpid() == self._pid

    @property
    def is_storing(self) -> bool:
        """Whether the step's code has ended well here and its results are being stored."""
        return self.in_task and self._state is State.STORING

    @property
    def runs_own_code(self) -> bool:
        """Whether the step's own code runs here, outside of `run`."""
        return self._state in (State.STEP, State.TOLD)

    def _enter(self, state: State) -> None:
        """Go to another state; called with the lock."""
        assert state in NEXT[self._state], f"a member can't go from {self._state.name} to {state.name}"
        self._state = state
        self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_over, timeout_s)

    # --- called by the channel, in its thread ---------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Handle a message of the control node."""
        if isinstance(message, Welcome | Ack | Bye):
            self._advance_control(_SAYS[type(message)])
        elif isinstance(message, Replaced):
            self.notice(message.why)
        elif isinstance(message, Abort):
            message.error.events = message.error.events or [record.as_dict() for record in message.events]
            self._break(message.error)
        elif isinstance(message, Alone):
            with self._lock:
                if self._state is State.WAITING:
                    self._enter(State.ALONE)

    def lose_control(self, reason: str) -> None:
        """Handle the loss of the control node: its connection has ended, or it is silent."""
        if self._control is not ControlNode.BYE:
            self._lost = lost_control(reason)
            self._break(self._lost)
        self._advance_control(ControlNode.GONE)

    def lose_supervisor(self, how: str) -> None:
        """Handle the end of this node's supervisor, which holds the channel; `how` as in "its … ended unexpectedly"."""
        self._break(failed(LaunchFailed, FailureText(Cause("agent_ended", self.node, self.host, exception=how))))
        self._advance_control(ControlNode.GONE)

    def _advance_control(self, control: ControlNode) -> None:
        with self._lock:
            self._control = max(self._control, control)
            self._changed.notify_all()

    def _break(self, error: TorchrunError) -> None:
        with self._lock:
            if self.broken is not None or self._state in OVER:
                return
            self.broken = error
            self._changed.notify_all()
            if self._state is State.LAUNCH:
                self.inbox.put(Interruption.BROKEN)
        self._wakeup.wake()

    # --- reaching the step's code ---------------------------------------------------------------

    def record_sigterm(self) -> bool:
        """Keep a SIGTERM for `raise_news`, which the wake signal calls next; return whether this member handles it."""
        if not self.in_task or self._state in OVER:
            return False
        self._sigterms.append(_SIGTERM_CAME)
        return True

    def notice(self, why: str) -> None:
        """End this node as after a SIGTERM; `why` follows the words "node 1 was preempted: "."""
        # As with a signal, the innermost launch stops in order, and what it raises reaches this node's step.
        self._wakeup.innermost.notice_here(why)

    def notice_here(self, why: str) -> None:
        """Do so for this member, once: notices repeat, but a second order would end a launch without its grace."""
        with self._lock:
            if self.broken is not None or self._order is not None:
                return
            self._set_order(why)
        self._wakeup.wake()

    def _set_order(self, why: str) -> None:
        if self._state not in OVER:
            self._order = self._order or why
            if self._state is State.LAUNCH:
                self.inbox.put(Interruption.MUST_END)

    def has_news(self) -> bool:
        """Return whether the step's own code must be interrupted."""
        if self._state is State.LAUNCH or self._state in OVER:
            return False
        return self._order is not None or (self.broken is not None and self._state is not State.TOLD)

    def raise_news(self) -> None:
        """Raise the gang's error or the order to end, once; called in the step's thread, or in a handler there."""
        if not self.in_task:
            return
        with self._lock:
            with suppress(IndexError):  # the handler of the wake signal may interrupt this loop and take them first
                while True:
                    self._set_order(self._sigterms.popleft())
            if not self.has_news():
                return
            if self.broken is not None:
                self._order = None
                self._enter(State.TOLD)
                raise self.broken
            error = self.terminated()
            self._enter(State.ENDING)
            self.send(Leave(self.cause_of(error), failed=True))
        self._wakeup.restore_handlers()
        raise error

    def time_out(self, text: str) -> None:
        """Raise `LaunchTimeout`, or let the launch that runs do so; called by a signal handler, in the main thread."""
        if not self.in_task:
            return
        with self._lock:
            if self._state is State.LAUNCH:
                self.inbox.put(TimedOut(text))
            elif self._state not in OVER:
                raise self.timed_out(text)

    def terminated(self) -> TorchrunPreempted:
        """Return the error for a task that was told to stop."""
        return preempted(self.node, self.host, self.order)

    @property
    def order(self) -> str:
        """Why this node must end, if it must."""
        return self._order or _SIGTERM_CAME

    def timed_out(self, text: str) -> LaunchTimeout:
        """Return the error for a step whose time is up."""
        return timed_out(self.node, self.host, text)

    # --- called by the step's code --------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        if self._link is not None and self.in_task:
            self._link.send(message)

    @property
    def link(self) -> TaskLink | None:
        """The task's end of its connection to the gang."""
        return self._link

    def refuse_in_child(self) -> None:
        """Raise if this process is a fork of the task: only the task itself is a node of the gang."""
        if not self.in_task:
            raise GangError(
                f"current.torch.run was called in process {os.getpid()}, which was forked from the task (process "
                f"{self._pid}). Only the task itself can launch: call it there, for example in the step's own code."
            )

    def begin_launch(self, shows_output: bool = True) -> int:
        """Begin a launch with a new `inbox` and return its number; raise TorchrunError if none can begin."""
        self.refuse_in_child()
        with self._lock:
            error = self._obstacle()
            if error is not None:
                if error is self.broken and self._state is State.STEP:
                    self._enter(State.TOLD)
                raise error
            self.inbox = queue.SimpleQueue()
            self.shows_output = shows_output
            self._verdict = None
            self._launches += 1
            self._enter(State.LAUNCH)
            return self._launches - 1

    def _obstacle(self) -> TorchrunError | None:
        """Return why no launch can begin, or None."""
        if self._state is State.LAUNCH:
            return GangError(
                f"current.torch.run was called on node {self.node} while launch {self._launches - 1} still ran there, in "
                "another thread. A node takes part in one launch at a time: let the step's threads call it one after the "
                "other, in the same order on every node."
            )
        if self.broken is not None:
            return self.broken
        if self._state is State.ENDING or (self._order is not None and self._state not in OVER):
            return self.terminated()
        if self._control >= ControlNode.BYE or self._state not in (State.STEP, State.TOLD):
            return GangError(
                "current.torch.run was called after the gang had ended: the control node's step has already finished. Every "
                "node must call it the same number of times."
            )
        return None

    def end_launch(self, verdict: TorchrunError | None, failing: bool = False) -> None:
        """End the launch: the step's own code runs again. Raise news that came too late for the launch.

        `verdict` is what the gang has decided. If `failing`, the launch raises it, or another error.
        """
        with self._lock:
            self._verdict = verdict
            if self._state is State.LAUNCH:
                told = verdict is not None or (failing and self.broken is not None)
                self._enter(State.TOLD if told else State.STEP)
            unread = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
            if Interruption.MUST_END not in unread:
                self._order = None  # the launch has handled it
        if not failing or Interruption.MUST_END in unread:
            self.raise_news()
        for news in unread:
            if isinstance(news, TimedOut):
                self.time_out(news.text)

    def finish(self) -> None:
        """Report that the step's code has ended well; the node stays a member until its results are stored.

        Raises the order to end, if the step's code has swallowed it: the gang has failed for it.
        """
        if not self.in_task:
            return
        with self._lock:
            if self._state is State.LAUNCH:
                raise GangError(
                    f"The step's code has ended on node {self.node} while launch {self._launches - 1} still ran there in "
                    "another thread. Wait for the thread that has called current.torch.run."
                )
            if self._state is State.ENDING:
                raise self.terminated()
            if self._state not in (State.STEP, State.TOLD):
                return
            waits = self.node == CONTROL and self.num_nodes > 1
            self._enter(State.WAITING if waits else State.STORING)
        if self._link is not None:
            self._link.end_spares()
        self.send(Done())
        if waits:
            self.raise_news()
        else:
            self._wakeup.restore_handlers()

    def await_error(self, patience_s: float) -> None:
        """Raise the error that breaks the gang, if one comes in time."""
        if self.in_task and self._wait(lambda: self.broken is not None, patience_s) and self.broken is not None:
            raise self.broken

    def await_others(self, remaining: Callable[[], list[int]]) -> None:
        """Wait on the control node until the others have left; raise if a node fails or is lost meanwhile.

        From then on this node's results are being stored, as on a member after `finish`.
        """
        if not self.in_task or self._state is State.STORING:  # a gang of one has nobody to wait for
            return
        patience_s = QUIET_S
        while not self._wait(lambda: self._state is not State.WAITING or self.broken is not None, patience_s):
            patience_s = REMIND_S
            text = f"this node has finished; waiting until {names(remaining())} ended the step and stored the results"
            self.emit(Event("note", self.node, text))
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self._enter(State.STORING)
        self._wakeup.restore_handlers()

    def leave(self, error: BaseException | None = None, hold_s: float = 0.0) -> None:
        """Leave the gang; safe to call more than once, and without effect in a forked child.

        It waits for the control node's receipt, since some systems kill all tasks as soon as one has failed. After an
        error it waits `hold_s` seconds at most for the channel's end: then the control node's log holds the cause.
        """
        if not self.in_task or self._link is None:
            return
        with self._lock:
            before = self._state
            if before is State.LEFT:
                return
            if before is State.LAUNCH:  # it runs in another thread; the step's code itself has ended
                self.inbox.put(Interruption.BROKEN)
            self._enter(State.LEFT)
        try:
            if before is not State.ENDING:  # otherwise *leave* was sent already
                cause = None if error is None or self.gang_knows(error) else self.cause_of(error)
                self.send(Leave(cause, failed=error is not None))
            self._wait(lambda: self._control is not ControlNode.HERE, _ACK_WAIT_S)
            if error is not None and before is not State.ENDING:  # a preempted machine has no time for it
                self._wait(lambda: self._control is ControlNode.GONE, hold_s)
            self._at_end()
        finally:
            self._link.close()
            self._wakeup.restore_handlers()

    def gang_knows(self, error: BaseException) -> bool:
        """Return whether the gang knows this error already: it is, or is chained to, the gang's own verdict."""
        return any(link is self._verdict or (link is self.broken and link is not self._lost) for link in chain(error))

    def cause_of(self, error: BaseException) -> Cause:
        """Return an exception of this node's own step as a cause."""
        if isinstance(error, TorchrunError) and (cause := cause_of(error)) is not None:
            if error is not self._lost:
                return cause
            text = f"it lost the connection to the control node: {cause.exception}"
            return Cause("lost", self.node, self.host, exception=text)
        if isinstance(error, KeyboardInterrupt):
            return Cause("interrupted", self.node, self.host, exception="KeyboardInterrupt")
        kind = "call" if isinstance(error, TorchrunError) else "step"
        return Cause(kind, self.node, self.host, exception=words_of(error), detail=user_traceback(error))
