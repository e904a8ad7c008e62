"""What a supervisor does for its task as a member of the gang: on the control node it holds the gang."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any

from ..gang.gang import Gang
from ..gang.messages import CONTROL, Ended, Leave, Message, to_wire
from ..gang.policy import ConnectPolicy, Rules
from ..gang.wire import Plain, to_plain
from ..machine.looks import until_look
from ..machine.network import pick_port
from ..machine.pods import why_it_waits
from ..machine.processes import Other, send_signal
from .control_channel import ControlChannel
from .ends import Held, end_of
from .member_channel import MemberChannel
from .output import Output, Send
from .relay import LineSender, Relay
from .seat import Seat

# Nodes answer within a shorter time (`gang.limits`).
_REQUEST_S, _REQUEST_LOOK_S = 40.0, 0.1


class _Side:
    """One node's part in the gang: the public methods of both kinds, but `end`, answer what the task asks."""

    seat: Seat

    def __init__(self, tell_task: Send) -> None:
        self._tell_task = tell_task

    def _deliver(self, message: Message) -> None:
        """Hand a message for this node to its launch, and to its task."""
        if not self.seat.deliver(message):
            self._tell_task("deliver", to_wire(message))


class MemberSide(_Side):
    """A node other than the control node."""

    def __init__(
        self,
        tell_task: Send,
        output: Output,
        node: int,
        num_nodes: int,
        timeout_s: float,
        policy: Mapping[str, Any],
        place: str,
    ) -> None:
        super().__init__(tell_task)
        self.is_member = False  # whether this node has joined
        self.seat = Seat(node, num_nodes, output.show, self)
        self._channel = MemberChannel(node, self._deliver, self._lose, timeout_s, ConnectPolicy(**policy), place)
        self._lines = LineSender(self._channel, num_nodes)

    def _lose(self, reason: str) -> None:
        self._tell_task("lost", reason)
        self.seat.lose_control(reason)

    @property
    def own_address(self) -> str | None:
        """This host's address between it and the control node."""
        return self._channel.own_address

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        if isinstance(message, Ended | Leave):
            self._lines.send_all()  # so that they stand in the log before what comes next
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers."""
        self._lines.add(stream, text)

    async def connect(self, addresses: list[str], port: int, token: str, timeout_s: float) -> str:
        """Become a member; return the address that worked."""
        address = await self._channel.connect(addresses, port, token, timeout_s)
        self.is_member = True
        return address

    async def close(self, wait_s: float) -> None:
        """End the connection."""
        await self._channel.close()

    async def end(self) -> None:
        """Send what is still to be sent."""
        await self._channel.close()

    def fail(self, error: BaseException) -> None:
        """Tell the gang of an exception in the loop."""
        self._channel.fail(error)


class ControlSide(_Side):
    """The control node: it holds the gang."""

    is_member = True

    def __init__(
        self,
        tell_task: Send,
        output: Output,
        num_nodes: int,
        timeout_s: float,
        token: str,
        rules: Mapping[str, Any],
    ) -> None:
        super().__init__(tell_task)
        self.seat = Seat(CONTROL, num_nodes, output.show, self)
        self._rules = Rules(**rules, why_it_waits=why_it_waits)
        self._followed = Held()
        self._others: dict[int, Other] = {}  # on a local run, the tasks of the other nodes
        self._killed_at: dict[int, float] = {}  # when those are killed without which the gang goes on
        self._gang = Gang(num_nodes, pick_port, self._rules)
        self._relay = Relay(output)
        self._channel = ControlChannel(self._gang, self._deliver, token, timeout_s, self._relay.add)
        self._look()

    @property
    def own_address(self) -> str | None:
        """This host's address, as the first connection shows it."""
        return self._channel.own_address

    def send(self, message: Message) -> None:
        """Hand a message of the control node itself to the gang."""
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Do nothing: this node's lines are in its log already."""

    def gone(self, node: int, reason: str) -> None:
        """Tell the gang that another node's task has ended."""
        self._channel.report_gone(node, reason)

    def follow(self, tasks: list[tuple[int, int, str]]) -> None:
        """Tell the gang when the tasks of other nodes end, each a node's index, its pid, and when it began."""
        for node, pid, began in tasks:
            task = self._others[node] = Other(pid, began)
            self._followed.begin(self._follow(node, task))

    async def _follow(self, node: int, task: Other) -> None:
        self._channel.report_gone(node, f"its task {await end_of(task)}")

    async def request(self, asked: str, kind: str) -> Plain | None:
        """Find out what a command asks of the gang; return the answer, or None if none comes in time."""
        if kind != "stacks":
            return {"id": asked, "unknown": True}
        self._channel.ask_stacks(asked)
        deadline = asyncio.get_running_loop().time() + _REQUEST_S
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_REQUEST_LOOK_S)
            if (answer := self._gang.answer(asked)) is not None:
                return answer
        return None

    async def listen(self, port: int | None, host: str) -> int:
        """Open the channel; return its port."""
        return await self._channel.listen(port, host)

    def _look(self) -> None:
        """See whose task is to be ended; it repeats itself."""
        loop = asyncio.get_running_loop()
        self._end_lost(loop.time())
        self._looking = loop.call_later(until_look(), self._look)

    def _end_lost(self, now: float) -> None:
        """End the local tasks of nodes without which the gang goes on.

        The step of such a task may go on. Metaflow waits for its end, and so does another task.
        """
        for node in self._gang.without & self._others.keys():
            task = self._others[node]
            if now < self._killed_at.setdefault(node, now + self._rules.grace_s):
                continue
            if not task.has_ended:
                send_signal(task.pid, signal.SIGKILL)
            else:
                del self._others[node], self._killed_at[node]

    def news(self, known: list[int], with_numbers: bool) -> dict[str, Any]:
        """Return how much has changed, and the view, where that is more than what is known.

        Of numbers there is always more: they count only `with_numbers`.
        """
        gang = self._gang
        counts = [gang.changes, gang.numbers]
        has_more = counts[0] != known[0] or (with_numbers and counts != known)
        return {"counts": counts, "view": self.view() if has_more else None}

    def states(self) -> dict[str, Any]:
        """Return where the nodes' tasks are, and why the gang can't go on."""
        gang = self._gang
        return {
            "states": [node.presence.name for node in gang.nodes],
            "broken": None if gang.broken is None else to_plain(gang.broken),
        }

    def view(self) -> dict[str, Any]:
        """Return all that is known of the gang."""
        return self._gang.view.stored()

    async def close(self, wait_s: float) -> dict[str, Any]:
        """Wait until the members have left, a bounded time, and close; return what is known at the end."""
        self._looking.cancel()
        await self._channel.close(wait_s)
        self._relay.say_all_left_out()
        return {"states": self.states(), "view": self.view()}

    async def end(self) -> None:
        """Hold the gang until all nodes know its end; the next attempt may want the port."""
        self._channel.stop_listening()
        await self._channel.close(self._rules.stop_s)

    def fail(self, error: BaseException) -> None:
        """Tell the gang of an exception in the loop."""
        self._channel.fail(error)
