"""A node's side of its gang, in its supervisor: what the gang says of a launch, and what interrupts one.

The task has the other half, `member`. Everything here runs in the supervisor's loop. What happens is put into `inbox`, which
the launch reads; each launch has its own, since those before it may still be ending. `control_side` and `member_side` have
the connections.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ..errors import TorchrunError
from ..events import Event, Kind
from ..gang.messages import Abort, Farewell, Message, Note, OfLaunch, to_wire
from .endings import Broken, lost_control
from .output import Output, Send


class Side:
    """One node's part in its gang. `tell_task` sends a frame to the task."""

    own_address: str | None = None  # this host's, between it and the other nodes

    def __init__(self, node: int, num_nodes: int, tell_task: Send, output: Output) -> None:
        self.node, self.num_nodes = node, num_nodes
        self.host = socket.gethostname()
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # of the launch that the task has asked for last
        self.broken: TorchrunError | None = None  # why the gang can't go on
        self._says_bye = False  # the control node has announced that it leaves
        self.tell_task, self._output = tell_task, output

    def send(self, message: Message) -> None:
        """Send a message to the control node; returns at once."""
        raise NotImplementedError

    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers; the control node's are in its log already."""

    def say(self, kind: Kind, text: str, is_detail: bool = False) -> None:
        """Write lines to this node's log, or to its details, and tell the task of them."""
        self._output.show(Event(kind, self.node, text, is_detail))

    # --- what the control node says

    def deliver(self, message: Message) -> None:
        """Hand a message for this node to its launch, or to its task."""
        if isinstance(message, Note):
            self.say("note", message.text)
        elif isinstance(message, OfLaunch):
            self.inbox.put_nowait(message)
        else:
            if isinstance(message, Abort):
                self._break(message.error)
            self._says_bye |= isinstance(message, Farewell) and message.what == "bye"
            self.tell_task("deliver", to_wire(message))

    def lose_control(self, reason: str) -> None:
        """Handle the loss of the control node. If it has said that it leaves, that concerns only a launch that still runs."""
        self.tell_task("lost", reason)
        if self._says_bye:
            self.inbox.put_nowait(Broken(lost_control(reason)))
        else:
            self._break(lost_control(reason))

    def _break(self, error: TorchrunError) -> None:
        self.broken = self.broken or error
        self.inbox.put_nowait(Broken(self.broken))
