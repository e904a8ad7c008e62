"""A node's seat in its gang, from the step's begin to its end.

It holds the channel, numbers the launches, and makes sure that the news "the gang is broken" reaches
the step's code wherever it is: inside `run` as a message, outside of it as an exception in the main
thread, raised by the handler of a signal of our own. SIGTERM is taken while the step runs, too, but only
as what it is: an order from outside to end.

Who may touch what. The step's threads, the channel's thread and signal handlers, which interrupt the main
thread, meet in `State`: it changes under the lock only, together with what has to be told. The lock can be
taken again by the thread that has it, since a handler may interrupt the main thread while that holds it.
That is safe, because a handler either leaves the state alone or raises, so that what it interrupted does not
go on. A forked child shares none of this: it has no channel, and its handlers are the former ones.
"""

from __future__ import annotations

import _thread
import enum
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from .errors import GangError, LaunchFailed, LaunchTimeout, TorchrunError, TorchrunPreempted, from_wire
from .events import Event, Subscriber
from .failure import Cause
from .launch_state import CONTROL, QUIET_S, REMIND_S, Message, names
from .tracebacks import user_traceback

# How long a leaving node waits for the control node to say that it has read the cause.
_ACK_WAIT_S = 5.0
# Interrupts the main thread. A real-time signal, beside that of `evidence`; see there. SIGURG does no harm
# where there are none.
_WAKE = int(signal.SIGRTMAX) - 6 if hasattr(signal, "SIGRTMAX") else int(signal.SIGURG)
# A signal can fall between a check and the blocking call after it, so it is sent again: first and longest pause.
_WAKE_PAUSES_S = (0.05, 5.0)
_SIGTERM_CAME = "its Metaflow task got SIGTERM"


class State(enum.Enum):
    """Where the step's code is, which decides how news reaches it."""

    STEP = "in code of its own: news interrupts it"
    LAUNCH = "in a launch: news goes to the launch's inbox"
    TOLD = "in code of its own, and has the gang's error already"
    WAITING = "ended on the control node, which waits for the others: news interrupts it"
    STORING = "ended on a member; its results are being stored"
    LEFT = "nothing more will come of this node"


_INTERRUPTED = frozenset({State.STEP, State.WAITING})
_OVER = frozenset({State.STORING, State.LEFT})
# Seats whose handlers are set, the innermost last: a step may have `TorchrunSingleNodeMultiGPU` in it.
_seats: list[Membership] = []


_fork = threading.local()


def _before_fork() -> None:
    # Python forgets a signal that came before its handler was set back to the default.
    if _seats:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := _fork.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_forked_child() -> None:
    """Give a forked child the handlers that were there before ours: what we do with a signal is the task's."""
    for seat in _seats[::-1]:
        seat.give_back_signals()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)


class Link(Protocol):
    """What a membership needs of its channel."""

    def send(self, message: Message) -> None:
        """Send a message to the control node."""


class Membership:
    """One node in its gang.

    Parameters
    ----------
    node : int
        This node's index.
    num_nodes : int
        The gang's size.
    emit : callable
        Takes the events.

    Attributes
    ----------
    inbox : queue.SimpleQueue
        Messages for the launch that runs; each has one of its own. `put` is safe in signal handlers.
    shows_output : bool
        Whether the last launch shows all that its workers write on this node.
    """

    def __init__(self, node: int, num_nodes: int, emit: Subscriber) -> None:
        self.node = node
        self.num_nodes = num_nodes
        self.host = socket.gethostname()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.emit = emit
        self.shows_output = True
        self._link: Link | None = None
        self._close_link: Callable[[], None] = lambda: None
        self._last_deed: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._state = State.STEP
        self._launches = 0
        self._acknowledged = threading.Event()
        self._welcomed = threading.Event()
        self._control_gone = threading.Event()
        self._wait_over = threading.Event()  # the others have left, or the gang is broken
        self._broken: TorchrunError | None = None
        self._deafness: str | None = None  # why the control node is not heard, which it may not know
        self._farewell = False
        self._verdict: TorchrunError | None = None
        self._order: str | None = None  # why this node must end
        self._previous_handlers: dict[int, Any] = {}

    def sit_down(self, link: Link, close_link: Callable[[], None]) -> None:
        """Begin to use `link`; `deliver` must get its messages from now on."""
        self._link, self._close_link = link, close_link
        if threading.current_thread() is threading.main_thread():
            _seats.append(self)
            for number, handler in self._handlers.items():
                self._previous_handlers[number] = signal.signal(number, handler)

    @property
    def _handlers(self) -> dict[int, Callable[[int, FrameType | None], None]]:
        return {int(signal.SIGTERM): self._on_sigterm, _WAKE: self._on_wake}

    @property
    def in_task(self) -> bool:
        """Whether this is the task's own process, and not one that it has forked."""
        return os.getpid() == self._pid

    @property
    def is_in_launch(self) -> bool:
        """Whether a launch of this node runs."""
        return self._state is State.LAUNCH

    @property
    def is_storing(self) -> bool:
        """Whether the step's code has ended well here and its results are being stored."""
        return self.in_task and self._state is State.STORING

    def at_end(self, deed: Callable[[], None]) -> None:
        """Have `deed` done when the node has said goodbye, before its channel closes."""
        self._last_deed = deed

    # --- called by the channel, in its thread ---------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Take a message of the control node."""
        kind = message.get("type")
        if kind == "welcome":
            self._welcomed.set()
        elif kind == "ack":
            self._acknowledged.set()
        elif kind == "bye":
            self._farewell = True
        elif kind == "alone":
            self._wait_over.set()
        elif kind == "note":
            self.emit(Event("note", self.node, message["text"]))
        elif kind == "replaced":
            self.notice(message["why"])
        elif kind == "control_lost":
            self._acknowledged.set()
            self._control_gone.set()
            if not self._farewell:
                self._deafness = message["reason"]
                self._break(self._control_lost(message["reason"]))
        elif kind == "abort":
            self._break(from_wire(message["error"]))
        else:
            with self._lock:
                if self._state is State.LAUNCH:  # else it is late news of a launch that was given up
                    self.inbox.put(message)

    def _control_lost(self, reason: str) -> TorchrunError:
        cause = Cause("lost", CONTROL, "the control node", exception=reason)
        return LaunchFailed(
            f"Node {CONTROL} (the control node) is lost: {reason}. Without it the gang can't go on; see its log.",
            cause.to_wire(),
        )

    def _break(self, error: TorchrunError) -> None:
        with self._lock:
            if self._broken is not None or self._state in _OVER:
                return
            self._broken = error
            self._wait_over.set()
            if self._state is State.LAUNCH:
                self.inbox.put({"type": "abort"})
                return
        self._wake()

    # --- reaching the step's code ---------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handlers[number]
        if self.in_task and self._state not in _OVER:
            self._take_order(_SIGTERM_CAME)
            self._raise_news()
        elif callable(previous):  # a child that was forked past Python, or a seat left outside of the main thread
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_wake(self, number: int, frame: FrameType | None) -> None:
        if self.in_task:
            for seat in _seats[::-1]:
                seat._raise_news()

    def notice(self, why: str) -> None:
        """Take the news that this node must end, as at a SIGTERM; safe to call in any thread.

        Parameters
        ----------
        why : str
            What goes on after "node 1 was preempted: ".
        """
        # As with a signal, the innermost launch stops in order, and what it raises reaches this node's step.
        seat = _seats[-1] if self in _seats else self
        if seat._broken is None and seat._order is None:  # the second order means: at once, and signs may repeat
            seat._take_order(why)
            seat._wake()

    def _take_order(self, why: str) -> None:
        with self._lock:
            if self._state not in _OVER:
                self._order = self._order or why
                if self._state is State.LAUNCH:
                    self.inbox.put({"type": "terminated"})

    def _news(self) -> bool:
        """Tell whether the step's own code has to be interrupted."""
        if self._broken is not None and self._state in _INTERRUPTED:
            return True
        return self._order is not None and self._state is not State.LAUNCH and self._state not in _OVER

    def _raise_news(self) -> None:
        """Raise what the step's own code has to know, once; called in its thread."""
        with self._lock:
            if not self._news():
                return
            if self._broken is not None:
                self._state, self._order = State.TOLD, None
                raise self._broken
        error = self.terminated()
        self.leave(error)
        raise error

    def _wake(self) -> None:
        """Have `_raise_news` called in the main thread soon, whatever blocks there; called in any thread."""
        if self._wake_once():
            with suppress(RuntimeError):  # no thread is to be had any more
                threading.Thread(target=self._keep_waking, name="torchrun-wake", daemon=True).start()

    def _keep_waking(self) -> None:
        pause_s, longest_s = _WAKE_PAUSES_S
        time.sleep(pause_s)
        while self._wake_once():
            pause_s = min(pause_s * 2, longest_s)
            time.sleep(pause_s)

    def _wake_once(self) -> bool:
        # Under the lock the seat is not left, so that the handler is not given back meanwhile.
        with self._lock:
            # A step may have reset all signals.
            if self not in _seats or not self._news() or not callable(signal.getsignal(_WAKE)):
                return False
            # The first gets through where the step has blocked signals, the second ends a blocking call.
            _thread.interrupt_main(_WAKE)  # type: ignore[arg-type]  # an int will do
            signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
            return True

    def terminated(self) -> TorchrunPreempted:
        """Return the error for a task that was told to stop."""
        cause = Cause("terminated", self.node, self.host, exception=self._order or _SIGTERM_CAME)
        who = cause.who[0].upper() + cause.who[1:]
        return TorchrunPreempted(f"{who} {cause.what}. {TorchrunPreempted.remedy}", cause.to_wire())

    def time_out(self, text: str) -> None:
        """Take the news that the step's time is up; called by a signal handler, in the main thread.

        Parameters
        ----------
        text : str
            What goes on after "node 1 ran ".

        Raises
        ------
        LaunchTimeout
            Where the step's own code runs; a launch is told and raises it itself.
        """
        with self._lock:
            if self._state is State.LAUNCH:
                self.inbox.put({"type": "timed_out", "text": text})
                return
        if self.in_task and self._state not in _OVER:
            raise self.timed_out(text)

    def timed_out(self, text: str) -> LaunchTimeout:
        """Return the error for a step whose time is up."""
        cause = Cause("step_timeout", self.node, self.host, exception=text)
        return LaunchTimeout(cause.describe(), cause.to_wire())

    # --- called by the step's code --------------------------------------------------------------

    def await_welcome(self, timeout_s: float) -> None:
        """Wait until the control node has taken us in.

        Raises
        ------
        GangError
            If it does not within `timeout_s` seconds, for example because another task already sits
            in this node's place.
        """
        if not self._welcomed.wait(timeout_s):
            raise GangError(
                f"Node {self.node} (host {self.host}) reached the control node but was not taken in within {timeout_s:g} s. "
                "Does another task of this attempt run with the same node index?"
            )

    @property
    def broken(self) -> TorchrunError | None:
        """Why the gang can't go on, or None."""
        return self._broken

    def refuse_in_child(self) -> None:
        """Raise if this is a process that the task has forked: the gang's nodes are the tasks alone."""
        if not self.in_task:
            raise GangError(
                f"current.torch.run was called in process {os.getpid()}, which was forked from the task (process "
                f"{self._pid}). Only the task itself can launch: call it there, for example in the step's own code."
            )

    def begin_launch(self) -> int:
        """Return the number of the launch that begins now; its messages go to a new `inbox`.

        Raises
        ------
        TorchrunError
            If the gang is broken, the control node has already left it, or another launch of this node runs.
        """
        self.refuse_in_child()
        with self._lock:
            error = self._obstacle()
            if error is None:
                self.inbox = queue.SimpleQueue()
                self._verdict = None
                number, self._launches = self._launches, self._launches + 1
                self._state = State.LAUNCH
                return number
            if error is self._broken and self._state is State.STEP:
                self._state = State.TOLD
        raise error

    def _obstacle(self) -> TorchrunError | None:
        """Return why no launch can begin, or None."""
        if self._state is State.LAUNCH:
            return GangError(
                f"current.torch.run was called on node {self.node} while launch {self._launches - 1} still ran there, in "
                "another thread. A node takes part in one launch at a time: let the step's threads call it one after the "
                "other, in the same order on every node."
            )
        if self._broken is not None:
            return self._broken
        if self._order is not None and self._state not in _OVER:
            return self.terminated()
        if self._farewell or self._state not in (State.STEP, State.TOLD):
            return GangError(
                "current.torch.run was called after the gang had ended: the control node's step has already finished. Every "
                "node must call it the same number of times."
            )
        return None

    def end_launch(self, verdict: TorchrunError | None, failing: bool = False) -> None:
        """Note that the step's own code has its thread again, and how the launch ended.

        Parameters
        ----------
        verdict : TorchrunError or None
            What the gang has decided.
        failing : bool, default False
            Whether the launch raises: `verdict`, that the gang is broken, or an error of its own.

        Raises
        ------
        TorchrunError
            News that came too late for the launch.
        """
        with self._lock:
            self._verdict = verdict
            if self._state is State.LAUNCH:
                told = verdict is not None or (failing and self._broken is not None)
                self._state = State.TOLD if told else State.STEP
            unread: dict[str, Message] = {}
            while not self.inbox.empty():
                message = self.inbox.get_nowait()
                unread[message["type"]] = message
            if "terminated" not in unread:
                self._order = None  # the launch has dealt with it
        if not failing or "terminated" in unread:
            self._raise_news()
        if "timed_out" in unread:
            self.time_out(unread["timed_out"]["text"])

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        if self._link is not None and self.in_task:
            self._link.send(message)

    def finish(self) -> None:
        """Say that the step's code has ended well; the seat is kept until `leave`.

        Then Metaflow stores a member's results. A task that dies there is missed by the control node, which
        waits for all to leave.

        Raises
        ------
        TorchrunError
            If the step has left a launch running in another thread or, on the control node, if the gang is broken.
        """
        with self._lock:
            if not self.in_task or self._state not in (State.STEP, State.TOLD, State.LAUNCH):
                return
            if self._state is State.LAUNCH:
                raise GangError(
                    f"The step's code has ended on node {self.node} while launch {self._launches - 1} still ran there in "
                    "another thread. Wait for the thread that has called current.torch.run."
                )
            waits = self.node == CONTROL and self.num_nodes > 1
            self._state = State.WAITING if waits else State.STORING
        self.send({"type": "done"})
        if waits:
            self._raise_news()
        else:
            self.give_back_signals()

    def await_others(self, remaining: Callable[[], list[int]]) -> None:
        """Wait until the other nodes have left, on the control node.

        It takes as long as their steps take: a node that falls silent is declared lost, and that ends
        the wait.

        Parameters
        ----------
        remaining : callable
            Returns the indexes of the nodes that have not left.

        Raises
        ------
        TorchrunError
            If a node fails or is lost meanwhile.
        """
        if not self.in_task:
            return
        patience_s = QUIET_S
        while not self._wait_over.wait(patience_s):
            patience_s = REMIND_S
            text = f"done here; waiting until {names(remaining())} ended the step and stored the results"
            self.emit(Event("note", self.node, text))
        if self._broken is not None:
            raise self._broken

    def leave(self, error: BaseException | None = None, hold_s: float = 0.0) -> None:
        """Leave the gang; safe to call more than once, and without effect in a forked child.

        With `error`, the gang learns why, and the control node's receipt is awaited, since some
        systems kill all tasks as soon as one has failed.

        Parameters
        ----------
        error : BaseException, optional
            What ended the step.
        hold_s : float, default 0
            How long to wait after an error until the control node has closed the channel, which it does
            when its log holds the cause.
        """
        if not self.in_task or self._link is None:
            return
        with self._lock:
            if self._state is State.LEFT:
                return
            if self._state is State.LAUNCH:  # in another thread than the step's code, which has ended
                self.inbox.put({"type": "abort"})
            self._state = State.LEFT
        if self._farewell or not self._welcomed.is_set():
            self._acknowledged.set()  # nobody is there to answer
        try:
            cause = None if error is None or self.gang_knows(error) else self.cause_of(error)
            self.send({"type": "leave", "cause": cause, "failed": error is not None})
            self._acknowledged.wait(_ACK_WAIT_S)
            if error is not None:
                self._control_gone.wait(hold_s)
            self._last_deed()
        finally:
            self._close_link()
            self.give_back_signals()

    def give_back_signals(self) -> None:
        """Set the former handlers, unless the step has set others meanwhile; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self not in _seats:
            return
        _seats.remove(self)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                if number == _WAKE:
                    signal.signal(number, signal.SIG_IGN)  # throws away what is pending, which would kill
                with suppress(TypeError):  # a handler not set from Python can't be set back
                    signal.signal(number, self._previous_handlers[number])

    def gang_knows(self, error: BaseException) -> bool:
        """Tell whether the gang has this error already: it is its own verdict, bare or chained."""
        link: BaseException | None = error
        while link is not None:
            if link is self._verdict or (link is self._broken and self._deafness is None):
                return True
            link = link.__cause__ or link.__context__
        return False

    def cause_of(self, error: BaseException) -> dict[str, Any]:
        """Return an exception of this node's own step as a cause, as plain data."""
        if error is self._broken and self._deafness is not None:
            text = f"it does not hear the control node any more: {self._deafness}"
            return Cause("lost", self.node, self.host, exception=text).to_wire()
        if isinstance(error, TorchrunError) and error.cause is not None:
            return error.cause
        kind = "call" if isinstance(error, TorchrunError) else "step"
        text = f"{type(error).__name__}: {error}"
        return Cause(kind, self.node, self.host, exception=text, detail=user_traceback(error)).to_wire()
