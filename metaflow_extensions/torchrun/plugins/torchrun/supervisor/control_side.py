"""The control node's side: it holds the gang and its end of the gang's connections.

Everything here runs in the supervisor's loop: that is why `Gang` needs no lock, and why each node's messages are handled
one after the other. The control node's own messages take the same way as the members', without a socket. An exception in
the loop breaks the gang with its text: otherwise no node would report it.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import GangError
from ..gang.gang import Gang, Outgoing
from ..gang.messages import CONTROL, Abort, Join, Lines, Message, What
from ..gang.policy import Rules
from ..gang.wire import Plain, to_plain
from ..machine.network import listening_socket, pick_port, room_for_connections
from ..machine.pods import why_it_waits
from ..machine.processes import Process, send_signal
from .connection import BEATS, Connection, close_all, encode
from .ends import Held, end_of, until_look
from .output import Output, Send
from .relay import Relay
from .side import Side

_TICK_S = 1.0  # the longest time between two ticks
_CLOSE_LOOK_S = 0.025
# How long a connection may take to prove who it is, and how long when all places are taken.
_HANDSHAKE_S, _HANDSHAKE_WHEN_FULL_S = 10.0, 2.0
_MAX_UNAUTHENTICATED = 2048  # at the same moment, besides the members
_BACKLOG = 65535  # connections that wait in the kernel; its own limit counts (net.core.somaxconn)
_AT_ONCE = 64  # so many are accepted before others have their turn
# Delay before a node whose task has ended is reported: its own last message says more, and should come first.
_REPORT_GONE_S = 0.2
_ANSWER_LOOK_S = 0.1
_CLOSED = "its connection to the control node was closed: its supervisor process or its machine is gone"


class ControlSide(Side):
    """The control node: it holds the gang and, with more than one node, listens for members."""

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
        super().__init__(CONTROL, num_nodes, tell_task, output)
        self._token = token
        self._timeout_s = timeout_s  # a member silent for so long is lost
        self._rules = Rules(**rules, why_it_waits=why_it_waits)
        self.gang = Gang(num_nodes, pick_port, self._rules)
        self._relay = Relay(output)
        self._work = Held()  # follows tasks, and serves connections
        self._others: dict[int, Process] = {}  # on a local run, the tasks of the other nodes
        self._killed_at: dict[int, float] = {}  # when those are killed without which the gang goes on
        self._server: asyncio.Server | None = None  # listens for members
        self._places = 0  # for connections
        self._connections: set[Connection] = set()
        self._members: dict[int, Connection] = {}  # each has its `node`
        self._has_failed = self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the next tick
        self._loop.call_soon(self._tick)

    # --- what its task and its launches ask ---------------------------------------------------------

    async def listen(self, port: int | None, host: str = "") -> int:
        """Open the channel and return its port; raise GangError if that can't be.

        None for `port` lets the kernel choose. An empty `host` means all interfaces.
        """
        self._places = room_for_connections(self.num_nodes - 1, _MAX_UNAUTHENTICATED)
        try:
            listener = listening_socket(port or 0, host, _BACKLOG)
        except OSError as error:
            raise GangError(
                f"The control node (host {self.host}) can't listen on channel port {port}: {error}. Choose another "
                "with @torchrun(channel_port=...), or leave it out: the kernel then chooses a free one."
            ) from error
        accept = partial(Connection, self._timeout_s, self._accept)
        self._server = await self._loop.create_server(accept, sock=listener, backlog=_AT_ONCE)
        listener.listen(_BACKLOG)
        return int(listener.getsockname()[1])

    def send(self, message: Message) -> None:
        """Hand a message of the control node itself to the gang, soon: what it answers may concern who calls."""
        self._loop.call_soon(self._step, self.gang.handle, CONTROL, message)

    def gone(self, node: int, reason: str) -> None:
        """Tell the gang that a node's task has ended; of a member, its own supervisor tells that."""
        self._loop.call_later(_REPORT_GONE_S, self._report_gone, node, reason)

    def _report_gone(self, node: int, reason: str) -> None:
        if node not in self._members:
            self._step(self.gang.lost, node, reason)

    def follow(self, tasks: list[tuple[int, int, str]]) -> None:
        """Tell the gang when the tasks of other nodes end, each a node's index, its pid, and when it began."""
        for node, pid, began in tasks:
            task = self._others[node] = Process(pid, began)
            self._work.begin(self._follow(node, task))

    async def _follow(self, node: int, task: Process) -> None:
        self.gone(node, f"its task {await end_of(task)}")

    async def request(self, asked: str, what: What, of: dict[str, Any]) -> Plain:
        """Do what a command asks, see `Request`, and return the answer."""
        self._step(self.gang.ask, asked, what, of)
        while asked not in self.gang.answers:
            await asyncio.sleep(_ANSWER_LOOK_S)
        answer: Plain = to_plain(self.gang.answers.pop(asked))
        return answer

    def news(self, known: int) -> dict[str, Any]:
        """Return how often the view has changed, and the view, where that is more often than what is `known`."""
        changes = self.gang.changes
        return {"changes": changes, "view": to_plain(self.gang.view) if changes != known else None}

    def states(self) -> list[str]:
        """Return where the nodes' tasks are."""
        return [node.presence.name for node in self.gang.nodes]

    async def close(self, wait_s: float) -> dict[str, Any]:
        """Wait until the members have left, `wait_s` seconds at most, and close; return what is known at the end."""
        deadline = time.monotonic() + wait_s
        while self.gang.members and time.monotonic() < deadline:
            await asyncio.sleep(_CLOSE_LOOK_S)
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_listening()
        await close_all(self._connections.copy())
        self._relay.say_all_left_out()
        return {"states": self.states(), "view": to_plain(self.gang.view)}

    async def end(self) -> None:
        """Hold the gang until all nodes know its end; the next attempt may want the port."""
        self._stop_listening()
        await self.close(self._rules.stop_s)

    def _stop_listening(self) -> None:
        """Accept no more connections; those that stand stay."""
        if self._server is not None:
            self._server.close()

    # --- the gang -------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Let time go on for the gang and for all connections: each timer wakes the process, so there is one."""
        if self._is_closing:
            return
        late_s = 0.0 if self._timer is None else self._loop.time() - self._timer.when()
        if late_s > _TICK_S:
            self._step(self.gang.was_stopped, late_s)
        tick_s = min(_TICK_S, self._timeout_s / BEATS / 3)  # the tick also sends heartbeats
        self._timer = self._loop.call_later(until_look(tick_s), self._tick)
        self._step(self.gang.tick)
        self._end_lost()
        patience_s = _HANDSHAKE_S if len(self._connections) < self._places else _HANDSHAKE_WHEN_FULL_S
        too_old = time.monotonic() - patience_s
        for connection in self._connections:
            if connection.is_proven:
                connection.beat()
            elif connection.opened_at < too_old:
                connection.abort("it has not proven that it is a member")

    def _end_lost(self) -> None:
        """End the local tasks of nodes without which the gang goes on.

        The step of such a task may go on. Metaflow waits for its end, and so does another task.
        """
        now = self._loop.time()
        for node in self.gang.without & self._others.keys():
            task = self._others[node]
            if now >= self._killed_at.setdefault(node, now + self._rules.grace_s):
                if task.has_ended:
                    del self._others[node], self._killed_at[node]
                else:
                    send_signal(task.pid, signal.SIGKILL)

    def _step(self, step: Callable[..., Sequence[Outgoing]], *args: Any) -> None:
        """Let the gang handle one event and send its messages; an exception breaks the gang, with its traceback."""
        try:
            self._dispatch(step(*args))
        except Exception as error:
            self.fail(error)

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        encoded: Message | None = None
        frame = b""
        for node, message in outgoing:
            if node == CONTROL:
                self.deliver(message)
            elif node in self._members:
                if message is not encoded:  # the same message for all is made into bytes once
                    encoded, frame = message, encode(message)
                self._members[node].write(frame)

    def fail(self, error: BaseException) -> None:
        """Break the gang because the channel itself has failed, which is a bug of ours; only the first time."""
        if self._has_failed or self._is_closing:
            return
        self._has_failed = True
        trace = "".join(traceback.format_exception(error)).rstrip()
        told = GangError(
            f"The gang's channel failed on the control node (host {self.host}). This is a bug in "
            f"metaflow-torchrun; please report it.\n{trace}"
        )
        try:
            self._dispatch(self.gang.give_up(told))
        except Exception:  # even this failed: close all connections, so that the members notice
            for connection in self._members.values():
                connection.abort("the channel failed")
            self.deliver(Abort(told))

    # --- connections ----------------------------------------------------------------------------

    def _accept(self, connection: Connection) -> None:
        self._connections.add(connection)
        if len(self._connections) > self._places:  # it may try again when others have not proven themselves in time
            connection.abort()
        self._work.begin(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            with suppress(EOFError):
                if await connection.shake_hands_as_control(self._token):
                    self._take_in(connection, await connection.receive())
        finally:
            if connection.node is None:
                connection.close()
                self._connections.discard(connection)

    def _take_in(self, connection: Connection, join: Message) -> None:
        """Make a member of whoever knows the token, unless the gang refuses it."""
        if not isinstance(join, Join) or not 0 <= join.node < self.num_nodes:
            return
        if (answer := self.gang.refuses(join)) is not None:
            connection.write(encode(answer))
            return
        before = self._members.get(join.node)
        if before is not None:  # this node has lost its connection, and joins again: the old one ends without a loss
            before.node = None
            before.abort()
        self._members[join.node], connection.node = connection, join.node
        self.own_address = self.own_address or connection.address("sockname")
        self._step(self.gang.handle, join.node, join)
        connection.attend(partial(self._handle, join.node), partial(self._ended, connection))

    def _ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection.node is not None:
            del self._members[connection.node]
            if not self._is_closing:
                self._step(self.gang.lost, connection.node, connection.why_aborted or _CLOSED)

    def _handle(self, node: int, message: Message) -> None:
        if isinstance(message, Lines):
            self._relay.add(node, message)
        else:
            self._step(self.gang.handle, node, message)
