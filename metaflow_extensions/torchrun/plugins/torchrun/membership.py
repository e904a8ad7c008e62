"""A node's seat in its gang, from the step's begin to its end.

It holds the channel, numbers the launches, and makes sure that the news "the gang is broken" reaches
the step's code wherever it is: inside `run` as a message, outside of it as an exception in the main
thread. For that SIGTERM is borrowed while the step runs: it is the one signal that interrupts
blocking calls and that a task must handle anyway.
"""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from .errors import GangError, LaunchFailed, TorchrunError, TorchrunPreempted, from_wire
from .events import Event, Subscriber
from .failure import Cause
from .launch_state import CONTROL, Message, names
from .tracebacks import user_traceback

# How long a leaving node waits for the control node to say that it has read the cause.
_ACK_WAIT_S = 5.0
# The control node waits for the others at its end: how often it looks, when it says so, and how often again.
_LOOK_S = 0.05
_QUIET_S = 10.0
_REMIND_S = 60.0


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
        Messages for the launch that runs; `put` is safe in signal handlers.
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
        self._launches = 0
        self._in_launch = False
        self._said_goodbye = False
        self._left = False
        self._acknowledged = threading.Event()
        self._welcomed = threading.Event()
        self._control_gone = threading.Event()
        self._broken: TorchrunError | None = None
        self._deafness: str | None = None  # why the control node is not heard, which it may not know
        self._farewell = False
        self._verdict: TorchrunError | None = None
        self._why_terminated = "its Metaflow task got SIGTERM"
        self._previous_handler: Any = None
        self._handler_set = False

    def sit_down(self, link: Link, close_link: Callable[[], None]) -> None:
        """Begin to use `link`; `deliver` must get its messages from now on."""
        self._link, self._close_link = link, close_link
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._handler_set = True

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
        elif kind == "note":
            self.emit(Event("note", self.node, message["text"]))
        elif kind == "control_lost":
            self._acknowledged.set()
            self._control_gone.set()
            if not self._farewell:
                self._deafness = message["reason"]
                self._break(self._control_lost(message["reason"]))
        elif kind == "abort":
            self._break(from_wire(message["error"]))
        else:
            self.inbox.put(message)

    def _control_lost(self, reason: str) -> TorchrunError:
        cause = Cause("lost", CONTROL, "the control node", exception=reason)
        return LaunchFailed(
            f"Node {CONTROL} (the control node) is lost: {reason}. Without it the gang can't go on; see its log.",
            cause.to_wire(),
        )

    def _break(self, error: TorchrunError) -> None:
        if self._broken is not None or self._said_goodbye:
            return
        self._broken = error
        if self._in_launch:
            self.inbox.put({"type": "abort"})
        elif self._handler_set and self._verdict is None:
            # Unless the step's code has its exception already, from a failed launch. A real signal
            # also ends a blocking call, such as a sleep.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    # --- called in the main thread --------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._in_launch:
            self.inbox.put({"type": "terminated"})
        elif self._broken is not None:
            raise self._broken
        else:
            error = self.terminated()
            self.leave(error)
            raise error

    def terminated(self) -> TorchrunPreempted:
        """Return the error for a task that was told to stop."""
        cause = Cause("terminated", self.node, self.host, exception=self._why_terminated)
        who = cause.who[0].upper() + cause.who[1:]
        return TorchrunPreempted(f"{who} {cause.what}. {TorchrunPreempted.remedy}", cause.to_wire())

    def notice(self, text: str) -> None:
        """Take the news that this node's machine will be taken away; safe to call in any thread."""
        if self._handler_set and self._broken is None and not self._said_goodbye:
            self._why_terminated = f"a spot notice says that its machine will be taken away ({text or 'no date'})"
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

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

    def begin_launch(self) -> int:
        """Return the number of the launch that begins now.

        Raises
        ------
        TorchrunError
            If the gang is broken, or the control node has already left it.
        """
        self._in_launch = True
        self._verdict = None
        if self._broken is not None:
            self.end_launch(self._broken)
            raise self._broken
        if self._farewell or self._said_goodbye:
            self.end_launch(None)
            raise GangError(
                "current.torch.run was called after the gang had ended: the control node's step has already finished. Every "
                "node must call it the same number of times."
            )
        while not self.inbox.empty():  # of a launch that an exception ended
            self.inbox.get_nowait()
        number, self._launches = self._launches, self._launches + 1
        return number

    def end_launch(self, verdict: TorchrunError | None) -> None:
        """Note that the step's own code has the main thread again, and how the launch ended."""
        self._verdict = verdict
        self._in_launch = False

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        if self._link is not None:
            self._link.send(message)

    def finish(self) -> None:
        """Say that the step's code has ended well; the seat is kept until `leave`.

        In between Metaflow stores the task's results. A task that dies there is missed by the control
        node, which waits for all to leave.
        """
        if not self._said_goodbye:
            self._said_goodbye = True
            self.send({"type": "done"})
            self._give_back_sigterm()

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
        say_at = time.monotonic() + _QUIET_S
        while nodes := remaining():
            if self._broken is not None:
                raise self._broken  # where no signal can tell: outside the main thread
            if time.monotonic() > say_at:
                say_at += _REMIND_S
                text = f"done here; waiting until {names(nodes)} ended the step and stored the results"
                self.emit(Event("note", self.node, text))
            time.sleep(_LOOK_S)
        if self._broken is not None:
            raise self._broken

    def leave(self, error: BaseException | None = None, hold_s: float = 0.0) -> None:
        """Leave the gang; safe to call more than once.

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
        if self._left or self._link is None:
            return
        if self._farewell or not self._welcomed.is_set():
            self._acknowledged.set()  # nobody is there to answer
        self._said_goodbye = self._left = True
        try:
            cause = None if error is None or self.gang_knows(error) else self.cause_of(error)
            self.send({"type": "leave", "cause": cause})
            self._acknowledged.wait(_ACK_WAIT_S)
            if error is not None:
                self._control_gone.wait(hold_s)
            self._last_deed()
        finally:
            self._close_link()
            self._give_back_sigterm()

    def _give_back_sigterm(self) -> None:
        if self._handler_set and threading.current_thread() is threading.main_thread():
            self._handler_set = False
            with suppress(TypeError):  # a handler not set from Python can't be set back
                signal.signal(signal.SIGTERM, self._previous_handler)

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
