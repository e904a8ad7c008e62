"""A node's seat in its gang, in its supervisor: what the gang says of a launch, and what interrupts one.

The task has the other half, `member`. Everything here runs in the supervisor's loop. What happens is put into `inbox`,
which the launch reads.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from ..errors import TorchrunError
from ..events import Event, Subscriber
from .cause import Cause, cause_of
from .endings import Interruption, TimedOut, lost_control, preempted, timed_out
from .protocol import Abort, Ask, Bye, Go, Link, Message, Note, Restart, Stop, Store, Verdict


@dataclass
class GivenUp(Exception):
    """The task has left the call of `run`, or has ended; `cause` is what the gang does not know yet."""

    cause: Cause | None


class Seat:
    """One node in its gang, as its launches see it."""

    def __init__(self, node: int, num_nodes: int, emit: Subscriber, link: Link) -> None:
        self.node, self.num_nodes, self.emit = node, num_nodes, emit
        self.host = socket.gethostname()
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # of the current launch; each launch has its own
        self._next: asyncio.Queue[Any] | None = None  # of a launch that is about to begin
        self.broken: TorchrunError | None = None  # why the gang can't go on
        self._link = link
        self._is_launching = False
        self._says_bye = False  # the control node has announced that it leaves
        self._order = ""  # why this node must end
        self._interruptions = 0  # of the current launch, as the task counts them

    # --- what comes from elsewhere

    def expect_launch(self) -> None:
        """Keep what comes from now on for the next launch; the last one may still be ending."""
        self._next = asyncio.Queue()
        self._interruptions = 0

    def _put(self, news: Any) -> None:
        (self.inbox if self._next is None else self._next).put_nowait(news)

    def deliver(self, message: Message) -> bool:
        """Handle a message of the control node; return whether it concerns launches alone."""
        if isinstance(message, Note):
            self.emit(Event("note", self.node, message.text, message.is_detail))
            return True
        if isinstance(message, Go | Ask | Stop | Restart | Store | Verdict):
            if self._is_launching:  # otherwise it is about a launch that this node has given up
                self._put(message)
            return True
        if isinstance(message, Abort):
            self._break(message.error)
        self._says_bye = self._says_bye or isinstance(message, Bye)
        return False

    def lose_control(self, reason: str) -> None:
        """Handle the loss of the control node."""
        if not self._says_bye:
            self._break(lost_control(reason))

    def _break(self, error: TorchrunError) -> None:
        self.broken = self.broken or error
        self._put(Interruption.BROKEN)

    def interrupt(self, why: str) -> None:
        """End this node as after a SIGTERM."""
        self._order = why
        self._interruptions += 1
        self._put(Interruption.MUST_END)

    def time_out(self, text: str) -> None:
        """Let the launch raise `LaunchTimeout`."""
        self._interruptions += 1
        self._put(TimedOut(text))

    def give_up(self, cause: Cause | None) -> None:
        """End the launch without a verdict: nobody waits for it here."""
        self._put(GivenUp(cause))

    # --- what a launch uses

    def begin_launch(self) -> None:
        """Begin a launch, with a new `inbox`; raise the gang's error if it is broken."""
        self.inbox, self._next = self._next or asyncio.Queue(), None
        self._is_launching = True
        if self.broken is not None:
            raise self.broken

    def end_launch(self) -> int:
        """End the launch; return how many interruptions it has handled. Later ones are the task's."""
        self._is_launching = False
        unread = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        return self._interruptions - sum(news is Interruption.MUST_END or isinstance(news, TimedOut) for news in unread)

    @property
    def own_address(self) -> str | None:
        """This host's address between it and the other nodes; None where that is not known."""
        return self._link.own_address

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self._link.send(message)

    async def settle_lines(self) -> None:
        """Wait until this node's log has all lines of other nodes that have arrived, a bounded time."""
        await self._link.settle_lines()

    def terminated(self) -> TorchrunError:
        """Return the error for a task that was told to stop."""
        return preempted(self.node, self.host, self._order)

    def timed_out(self, text: str) -> TorchrunError:
        """Return the error for a step whose time is up."""
        return timed_out(self.node, self.host, text)

    def gang_knows(self, error: BaseException) -> bool:
        """Return whether the gang knows this error already."""
        return error is self.broken or (isinstance(error, GivenUp) and error.cause is None)

    def cause_of(self, error: BaseException) -> Cause:
        """Return an error of this node as a cause."""
        if isinstance(error, GivenUp) and error.cause is not None:
            return error.cause
        found = cause_of(error) if isinstance(error, TorchrunError) else None
        return found or Cause("call", self.node, self.host, exception=str(error))
