"""A node as a member of its gang, from the step's begin to its end.

It numbers the launches. News of the gang must reach the step's code wherever that is: inside of `run` the supervisor
handles it, outside of it it comes as an exception in the main thread (see `wakeup`).

Who may touch what. The step's threads call `run`; one of them at a time is in a launch. Who reads the connection to the
supervisor calls `deliver`, `lose_control`, `lose_supervisor` and `notice`: a thread that waits, or the handler of the wake
signal. Handlers interrupt the main thread at any place. So there is no lock: each change is one assignment, and a handler
either leaves the state alone or raises, so that what it has interrupted does not go on.

- In the handler of SIGTERM only `record_sigterm` runs. It reads, and adds to `_sigterms`, a deque.
- In the handlers of the wake signal and of the alarm, `raise_news` and `time_out` run.
- In a forked child nothing works: every method checks `in_task`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ..errors import GangError, LaunchFailed, LaunchTimeout, TorchrunError, TorchrunPreempted, chain
from ..events import Event, Subscriber
from ..tracebacks import user_traceback, words_of
from .cause import Cause, FailureText, cause_of, failed
from .endings import NotNeeded, TimedOut, lost_control, preempted, timed_out
from .protocol import CONTROL, Abort, Ack, Alone, Bye, Done, Leave, Message, Replaced, TaskLink, Welcome
from .standing import NEXT, OVER, ControlNode, State
from .texts import QUIET_S, REMIND_S, names
from .wakeup import Wakeup

# How long a leaving node waits for the control node's receipt (*ack*).
_ACK_WAIT_S = 5.0
_SIGTERM_CAME = "its Metaflow task got SIGTERM"


_SAYS: dict[type, ControlNode] = {Welcome: ControlNode.HERE, Ack: ControlNode.ACKNOWLEDGED, Bye: ControlNode.BYE}


class Member:
    """One node in its gang."""

    def __init__(self, node: int, num_nodes: int, emit: Subscriber) -> None:
        self.node, self.num_nodes = node, num_nodes
        self.emit = emit  # gets events that are written, or can't be by the supervisor; `say` is for all others
        self.host = socket.gethostname()
        self.shows_output = True  # whether the last launch shows everything that a failing worker writes
        self.may_go_on = False  # whether the others may go on without this node, if it is told to end
        self._link: TaskLink | None = None
        self._at_end: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._wakeup = Wakeup(self)
        self._state = State.STEP
        self._control = ControlNode.UNKNOWN
        self._launches = 0
        # Which thread has called each launch. Who finds no obstacle, and is the first one here for a number, begins it: that
        # number was the next one before it looked for obstacles, and a launch that has begun is one.
        self._callers: dict[int, int] = {}
        self._sigterms: deque[str] = deque()  # SIGTERMs that `raise_news` has not handled
        self._order: str | None = None  # why this node must end, if it must
        # What interrupts the launch: orders to end, and ends of its time. `_untold` has what its supervisor does not know.
        self._interruptions: list[str | TimedOut] = []
        self._untold: deque[str | TimedOut] = deque()
        self._is_begun = False  # whether the supervisor knows of the launch
        self.broken: TorchrunError | None = None  # why the gang can't go on
        self._lost: TorchrunError | None = None  # the loss of the control node, which that node may not know of
        self._verdict: TorchrunError | None = None  # of the last launch
        self._not_needed: NotNeeded | None = None  # what each call of `run` raises on a node that was dismissed

    def attach(self, link: TaskLink, at_end: Callable[[], None] = lambda: None) -> None:
        """Begin to use `link`; `deliver` must get its messages from now on.

        `at_end` is called when the node has left, before the link closes.
        """
        self._link, self._at_end = link, at_end
        link.call_if_missed(self._wakeup.wake_again)
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
    def has_left(self) -> bool:
        """Whether this node has left the gang, although a launch may still run in another thread."""
        return self._state is State.LEFT

    @property
    def runs_own_code(self) -> bool:
        """Whether the step's own code runs here, outside of `run`."""
        return self._state in (State.STEP, State.TOLD)

    def _enter(self, state: State) -> None:
        """Go to another state."""
        assert state in NEXT[self._state], f"a member can't go from {self._state.name} to {state.name}"
        self._state = state

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        return is_over() if self._link is None else self._link.wait(is_over, timeout_s)

    # --- called by who reads the connection to the supervisor -----------------------------------

    def deliver(self, message: Message) -> None:
        """Handle a message of the control node."""
        if isinstance(message, Welcome | Ack | Bye):
            self._advance_control(_SAYS[type(message)])
        elif isinstance(message, Replaced):
            self.notice(message.why)
        elif isinstance(message, Abort):
            message.error.events = message.error.events or [record.as_dict() for record in message.events]
            self._break(message.error)
        elif isinstance(message, Alone) and self._state is State.WAITING:
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
        self._control = max(self._control, control)

    def _break(self, error: TorchrunError) -> None:
        if self.broken is None and self._state not in OVER:
            self.broken = error  # a launch ends by its supervisor
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
        if self.broken is None and self._order is None:
            self._set_order(why)
            self._wakeup.wake()

    def _set_order(self, why: str) -> None:
        if self._state not in OVER:
            self._order = self._order or why
            if self._state is State.LAUNCH:
                self._interrupt_launch(self._order)

    def _interrupt_launch(self, news: str | TimedOut) -> None:
        self._interruptions.append(news)
        self._untold.append(news)
        self._tell_launch()

    def _tell_launch(self) -> None:
        while self._is_begun and self._link is not None and self._untold:
            with suppress(IndexError):  # a signal handler has just told it
                news = self._untold.popleft()
                if isinstance(news, TimedOut):
                    self._link.time_out(news.text)
                else:
                    self._link.interrupt(news)

    def has_news(self) -> bool:
        """Return whether the step's own code must be interrupted."""
        if self._state is State.LAUNCH or self._state in OVER:
            return False
        return self._order is not None or (self.broken is not None and self._state is not State.TOLD)

    def raise_news(self) -> None:
        """Raise the gang's error or the order to end, once; called in the step's thread, or in a handler there."""
        if not self.in_task:
            return
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
        if self._state is State.LAUNCH:
            self._interrupt_launch(TimedOut(text))
        elif self._state not in OVER:
            raise self.timed_out(text)

    def terminated(self) -> TorchrunPreempted:
        """Return the error for a task that was told to stop."""
        return preempted(self.node, self.host, self.order, self.may_go_on)

    @property
    def order(self) -> str:
        """Why this node must end, if it must."""
        return self._order or _SIGTERM_CAME

    def timed_out(self, text: str) -> LaunchTimeout:
        """Return the error for a step whose time is up."""
        return timed_out(self.node, self.host, text)

    # --- called by the step's code --------------------------------------------------------------

    def say(self, event: Event) -> None:
        """Have an event written to this node's log, by the supervisor if it is there, and handed to `emit`."""
        if self._link is None or not self.in_task or not self._link.show(event):
            self.emit(event)

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

    @property
    def is_dismissed(self) -> bool:
        """Whether this node has left since a launch has ended well without it."""
        return self.in_task and self._not_needed is not None

    def dismiss(self, launch: int) -> NoReturn:
        """End the step's code here: the launch has ended well without this node, which the gang counts no more."""
        self._not_needed = NotNeeded(f"launch {launch} has ended well without this node, so its step ends here")
        raise self._not_needed

    def begin_launch(self, shows_output: bool = True) -> int:
        """Begin a launch and return its number; raise TorchrunError if none can begin."""
        self.refuse_in_child()
        number, own = self._launches, threading.get_ident()  # first: see `_callers`
        error = self._obstacle()
        if error is not None:
            if error is self.broken and self._state is State.STEP:
                self._enter(State.TOLD)
            raise error
        if self._callers.setdefault(number, own) != own:  # two threads at the same moment
            raise self._refused(number)
        self._interruptions, self._untold, self._is_begun = [], deque(), False
        self.shows_output = shows_output
        self._verdict = None
        self._enter(State.LAUNCH)
        self._launches += 1
        return number

    def has_begun(self) -> None:
        """Tell the supervisor, which knows of the launch by now, what has interrupted it."""
        self._is_begun = True
        self._tell_launch()

    def _refused(self, running: int) -> TorchrunError:
        return GangError(
            f"current.torch.run was called on node {self.node} while launch {running} still ran there, in another thread. "
            "A node takes part in one launch at a time: let the step's threads call it one after the other, in the same "
            "order on every node."
        )

    def _obstacle(self) -> TorchrunError | NotNeeded | None:
        """Return why no launch can begin, or None."""
        if self._not_needed is not None:
            return self._not_needed
        if self._state is State.LAUNCH:
            return self._refused(self._launches - 1)
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

    def end_launch(self, verdict: TorchrunError | None, failing: bool = False, handled: int | None = None) -> None:
        """End the launch: the step's own code runs again. Raise news that came too late for the launch.

        `verdict` is what the gang has decided. If `failing`, the launch raises it, or another error. `handled` is how many
        interruptions the launch has handled; None: all.
        """
        self._verdict, self._order = verdict, None
        if self._state is State.LAUNCH:
            told = verdict is not None or (failing and self.broken is not None)
            self._enter(State.TOLD if told else State.STEP)
        late = [] if handled is None else self._interruptions[handled:]
        for news in late:
            if isinstance(news, str):
                self._set_order(news)
        if not failing or self._order is not None:
            self.raise_news()
        for news in late:
            if isinstance(news, TimedOut):
                self.time_out(news.text)

    def finish(self) -> None:
        """Report that the step's code has ended well; the node stays a member until its results are stored.

        Raises the order to end, if the step's code has swallowed it: the gang has failed for it.
        """
        if not self.in_task:
            return
        if self._state is State.LAUNCH:
            raise GangError(
                f"The step's code has ended on node {self.node} while launch {self._launches - 1} still ran there in "
                "another thread. Wait for the thread that has called current.torch.run."
            )
        if self._link is not None:  # its code may have blocked all signals
            self._link.look()
        self.raise_news()
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
            self.say(Event("note", self.node, text))
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
        before = self._state
        if before is State.LEFT:
            return
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
