"""A node's seat in its gang, in its supervisor: what the gang says of a launch, and what interrupts one.

The task has the other half, `member`. Everything here runs in the supervisor's loop. What happens is put into `inbox`,
which the launch reads.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

from ..errors import TorchrunError
from ..events import Event, Subscriber
from ..gang.messages import Abort, Ask, Farewell, Go, Link, Message, Note, Restart, Stop, Store, Verdict
from ..machine.looks import until_look
from .endings import Broken, lost_control


class Seat:
    """One node in its gang, as its launches see it."""

    def __init__(self, node: int, num_nodes: int, emit: Subscriber, link: Link) -> None:
        self.node, self.num_nodes, self.emit = node, num_nodes, emit
        self.host = socket.gethostname()
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # of the current launch; each launch has its own
        self._next: deque[asyncio.Queue[Any]] = deque()  # of launches that are about to begin, in order
        self.broken: TorchrunError | None = None  # why the gang can't go on
        self.link = link
        self._says_bye = False  # the control node has announced that it leaves

    def expect_launch(self) -> None:
        """Keep what comes from now on for one more launch; those before it may still be ending, or never begin."""
        self._next.append(asyncio.Queue())

    def put(self, news: Any) -> None:
        """Put news into the inbox of the launch that the task has asked for last."""
        (self._next[-1] if self._next else self.inbox).put_nowait(news)

    def deliver(self, message: Message) -> bool:
        """Handle a message of the control node; return whether it concerns launches alone."""
        if isinstance(message, Note):
            self.emit(Event("note", self.node, message.text, message.is_detail))
            return True
        if isinstance(message, Go | Ask | Stop | Restart | Store | Verdict):
            self.put(message)
            return True
        if isinstance(message, Abort):
            self._break(message.error)
        self._says_bye |= isinstance(message, Farewell) and message.what == "bye"
        return False

    def lose_control(self, reason: str) -> None:
        """Handle the loss of the control node. If it has said that it leaves, that concerns only a launch that still runs."""
        if self._says_bye:
            self.put(Broken(lost_control(reason)))
        else:
            self._break(lost_control(reason))

    def _break(self, error: TorchrunError) -> None:
        self.broken = self.broken or error
        self.put(Broken(self.broken))

    def begin_launch(self) -> None:
        """Begin a launch, with a new `inbox`."""
        self.inbox = self._next.popleft() if self._next else asyncio.Queue()

    async def next(self) -> Any:
        """Return what comes next, or None when it is time to look at what no news tells."""
        try:
            return await asyncio.wait_for(self.inbox.get(), until_look())
        except asyncio.TimeoutError:
            return None
