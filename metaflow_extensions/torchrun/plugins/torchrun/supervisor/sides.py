"""What a supervisor does for its task as a member of the gang: on the control node it holds the gang."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ..channel.control_channel import REPORT_GONE_S, ControlChannel
from ..channel.member_channel import MemberChannel
from ..channel.relay import Relay
from ..events import Event
from ..feature_list import keeps
from ..gang.keepers import Keepers
from ..gang.nodes import NodeState
from ..gang.policy import ConnectPolicy, Rules
from ..gang.protocol import CONTROL, Message, to_wire
from ..gang.seat import Seat
from ..gang.state import Gang
from ..gang.wire import to_plain
from ..logs import console
from ..machine.detached import beside
from ..machine.looks import WATCH_S, is_due, until_look
from ..machine.network import pick_port
from ..machine.pods import why_it_waits
from ..machine.processes import Other, send_signal
from ..records.snapshot import snapshot_of
from .ends import end_of
from .held import Held
from .output import Send


class Side(ABC):
    """One node's part in the gang: the public methods of both kinds, but `end`, answer what `channel/client` asks."""

    def __init__(self, tell_task: Send, node: int, num_nodes: int, show: Callable[[Event], None]) -> None:
        self._tell_task = tell_task
        self.is_member = node == CONTROL  # whether this node has joined
        self.seat = Seat(node, num_nodes, show, self)

    def _deliver(self, message: Message) -> None:
        """Hand a message for this node to its launch, and to its task."""
        if not self.seat.deliver(message):
            self._tell_task("deliver", to_wire(message))

    @property
    @abstractmethod
    def own_address(self) -> str | None:
        """This host's address between it and the other nodes; None where that is not known."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message of this node to the control node."""

    @abstractmethod
    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers to the control node's log."""

    @abstractmethod
    async def settle_lines(self) -> None:
        """Wait until this node's log has all lines of other nodes that have arrived, a bounded time."""

    @abstractmethod
    async def end(self) -> None:
        """Let the gang come to its end: the task is gone."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the gang of an exception in the loop, which is a bug of ours."""


class MemberSide(Side):
    """A node other than the control node."""

    def __init__(
        self,
        tell_task: Send,
        show: Callable[[Event], None],
        node: int,
        num_nodes: int,
        timeout_s: float,
        policy: Mapping[str, Any],
        place: str,
    ) -> None:
        super().__init__(tell_task, node, num_nodes, show)
        self._channel = MemberChannel(
            node, self._deliver, self._lose, timeout_s, ConnectPolicy(**policy), num_nodes, place=place
        )

    def _lose(self, reason: str) -> None:
        self._tell_task("lost", reason)
        self.seat.lose_control(reason)

    @property
    def own_address(self) -> str | None:
        """This host's address between it and the control node."""
        return self._channel.own_address

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers."""
        self._channel.send_lines(stream, text)

    async def settle_lines(self) -> None:
        """Do nothing: only the control node's log has lines of other nodes."""

    async def connect(self, addresses: list[str], port: int, token: str, timeout_s: float) -> str:
        """Become a member; return the address that worked."""
        try:
            address = await self._channel.connect(addresses, port, token, timeout_s)
            self.is_member = True
            return address
        finally:
            self._tell_task("hold", self._channel.hold_s)

    async def close(self, wait_s: float) -> None:
        """End the connection."""
        await self._channel.close()

    async def end(self) -> None:
        """Send what is still to be sent."""
        await self._channel.close()

    def fail(self, error: BaseException) -> None:
        """Tell the gang of an exception in the loop."""
        self._channel.fail(error)


class ControlSide(Side):
    """The control node: it holds the gang."""

    def __init__(
        self,
        tell_task: Send,
        show: Callable[[Event], None],
        num_nodes: int,
        timeout_s: float,
        token: str,
        rules: Mapping[str, Any],
    ) -> None:
        super().__init__(tell_task, CONTROL, num_nodes, show)
        self._rules = Rules(**rules, why_it_waits=why_it_waits)
        self._followed = Held()
        self._others: dict[int, Other] = {}  # on a local run, the tasks of the other nodes
        self._vacant: set[int] = set()  # nodes of which no task is left
        self._joins: dict[int, int] = {}  # of nodes whose new task runs, how many had joined before it
        self._to_start: set[int] = set()  # of the vacant ones, those in whose place the task is to start another
        self._killed_at: dict[int, float] = {}  # when those are killed without which the gang goes on
        keepers = Keepers.of(keeps(), num_nodes)
        self._gang = Gang(num_nodes, pick_port, self._rules, keepers)
        self._relay = Relay()  # of the members' lines; dropped, unless it is started
        self._channel = ControlChannel(self._gang, self._deliver, token, timeout_s, self._relay.add)
        # What the task does in the background, by name: when it is due if there is news, and in any case; and what was known
        # of the gang when it was done last.
        self._due: dict[str, tuple[float, float, Any]] = {}
        self._seen: dict[str, Any] = {}
        self._look()

    @property
    def own_address(self) -> str | None:
        """This host's address, as the first connection shows it."""
        return self._channel.own_address

    def relay(self) -> None:
        """Write the other nodes' lines into this node's log."""
        self._relay.start(console)

    async def settle_lines(self) -> None:
        """Wait until this node's log has all lines of other nodes that have arrived, a bounded time."""
        await self._relay.settle()

    def has_written(self, node: int, text: str) -> bool:
        """Return whether this node's log has all lines of a text that a node's workers wrote."""
        return self._relay.has_written(node, text)

    def send(self, message: Message) -> None:
        """Hand a message of the control node itself to the gang."""
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Do nothing: this node's lines are in its log already."""

    def gone(self, node: int, reason: str) -> None:
        """Tell the gang that another node's task has ended, and that no other one will come."""
        self._channel.report_gone(node, reason, is_last=True)

    def follow(self, tasks: list[tuple[int, int, str]], are_replacements: bool) -> None:
        """Tell the gang when the tasks of other nodes end, each a node's index, its pid, and when it began."""
        for node, pid, began in tasks:
            task = self._others[node] = Other(pid, began)
            self._killed_at.pop(node, None)
            if are_replacements:
                self._joins[node] = self._gang.nodes.joins(node)
            self._followed.begin(self._follow(node, task))

    async def _follow(self, node: int, task: Other) -> None:
        how = await end_of(task)
        self._channel.report_gone(node, f"its task {how}", is_last=self._is_coming(node))
        await asyncio.sleep(2 * REPORT_GONE_S)  # the gang knows it by then, so it is no news of the next task
        while beside([task]):  # its supervisor ends the workers, and they have the accelerators
            await asyncio.sleep(WATCH_S)
        self._vacant.add(node)

    def _is_coming(self, node: int) -> bool:
        """Return whether a node's new task runs, and has not joined yet."""
        return self._joins.get(node) == self._gang.nodes.joins(node)

    def nodes_to_start(self) -> list[int]:
        """Return the nodes in whose place another task is to be started, each once."""
        found, self._to_start = self._to_start, set()
        return sorted(found)

    def request(self, feature: str, data: dict[str, Any]) -> None:
        """Hand a feature what a command asks of the gang."""
        self._channel.request(feature, data)

    async def listen(self, port: int | None, host: str) -> int:
        """Open the channel; return its port."""
        return await self._channel.listen(port, host)

    def look_in(self, name: str, news_s: float, any_s: float) -> None:
        """Have the task do a work in `news_s` seconds if there is news of the gang by then, and in `any_s` in any case."""
        now = asyncio.get_running_loop().time()
        self._due[name] = now + news_s, now + any_s, self._seen.get(name)

    def _look(self) -> None:
        """See what is due; it repeats itself."""
        loop = asyncio.get_running_loop()
        now, known = loop.time(), self.counts()
        for name, (if_news, in_any_case, before) in list(self._due.items()):
            if is_due(in_any_case - now) or (is_due(if_news - now) and known != before):
                del self._due[name]  # until the task has done it, and says when it is due again
                self._seen[name] = known
                self._tell_task("look", name)
        self._end_lost(now)
        if found := self._gang.to_replace & self._vacant:
            self._vacant -= found
            self._to_start |= found
            self._tell_task("look", "torchrun-nodes")  # as `task_gang` names this work
        self._looking = loop.call_later(until_look(), self._look)

    def _end_lost(self, now: float) -> None:
        """End the local tasks of nodes without which the gang goes on.

        The step of such a task may go on. Metaflow waits for its end, and so does another task.
        """
        for node in self._gang.without & self._others.keys():
            if self._is_coming(node) and self._gang.nodes[node] is NodeState.AWAITED:
                continue
            task = self._others[node]
            if now < self._killed_at.setdefault(node, now + self._rules.grace_s):
                continue
            if not task.has_ended:
                send_signal(task.pid, signal.SIGKILL)
            else:
                del self._others[node], self._killed_at[node]

    def pop_answer(self, feature: str) -> dict[str, Any] | None:
        """Return the newest answer of a feature, once."""
        return self._gang.keepers.pop_answer(feature)

    def counts(self) -> dict[str, Any]:
        """Return what the task wants to know often: how much there is."""
        keepers = self._gang.keepers
        return {"records": self._gang.history.count, "numbers": keepers.count, "heard": keepers.heard}

    def view(self) -> dict[str, Any]:
        """Return how the gang is."""
        gang = self._gang
        return {
            "states": [(gang.nodes[node] or NodeState.ABSENT).name for node in range(gang.num_nodes)],
            "broken": None if gang.broken is None else to_plain(gang.broken),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return all that has happened to the gang."""
        return snapshot_of(self._gang).stored()

    async def close(self, wait_s: float) -> dict[str, Any]:
        """Wait until the members have left, a bounded time, and close; return what is known at the end."""
        self._looking.cancel()
        await self._channel.close(wait_s)
        self._relay.close()
        return {"counts": self.counts(), "view": self.view(), "snapshot": self.snapshot()}

    async def end(self) -> None:
        """Hold the gang until all nodes know its end; the next attempt may want the port."""
        await self._channel.stop_listening()
        await self._channel.close(self._rules.stop_s)

    def fail(self, error: BaseException) -> None:
        """Tell the gang of an exception in the loop."""
        self._channel.fail(error)
