"""Authenticated, framed messages between the control node and the members; heartbeats.

A connection begins with a fixed-length handshake in which both sides prove that they know the
gang's token, by HMAC-SHA256 over the other's nonce; nothing else is read from a stranger. Then
frames follow, see `frames`. A member says *join* and is in when the control node says *welcome*; if
the connection ends before, it knocks again.

Each side runs one asyncio loop in a thread of its own, and only that thread touches the connections.
The control node's own supervisor talks to the same `Gang` through the same loop, without a socket, so
there is one code path for all nodes. What is raised in such a loop breaks the gang, with its text:
nobody would hear of it otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import random
import secrets
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any

from .errors import GangError, from_wire, to_wire
from .frames import LENGTH, decode, encode, length_of
from .gang import Gang, Outgoing
from .launch_state import CONTROL, Message
from .network import PORT_TAKEN, place, plain_address
from .open_files import OpenFiles, limit_of_at_least

_MAGIC = b"mf-torchrun/1\0\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_BEAT = encode({"type": "beat"})
_BEATS = 5  # in the time after which silence means loss
# How long those who connect may take to prove that they are members, and how long when all places are taken.
_HANDSHAKE_S = 10.0
_HURRY_S = 2.0
# How many may do so at the same moment besides the members themselves; more have to wait in the kernel's queue.
_MAX_STRANGERS = 2048
_BACKLOG = 65535  # the kernel's own limit counts (net.core.somaxconn)
_ACCEPT_AT_ONCE = 256
_TICK_S = 0.1
_CONNECT_S = 5.0
# How long an address is tried before the next one is tried beside it (RFC 8305), and within what
# time all are: a host can have many, and packets to the wrong ones may vanish without an answer.
_STAGGER_S = 0.25
_ALL_TRIED_S = 2.0
_RETRY_LIMIT_S = 2.0
_CLOSE_S = 5.0
_FLUSH_S = 1.0

Deliver = Callable[[Message], None]
Talk = Generator[int, bytes, None]


def new_token() -> str:
    """Return a fresh random token for one gang, as text."""
    return secrets.token_hex(32)


class _LoopThread:
    """An asyncio loop in a daemon thread; `on_error` is called there with what a callback has raised."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        # Not the kind that the step may have set as its policy: we must know the selector.
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.loop.set_exception_handler(lambda _, context: self._raised(context, on_error))
        _loops.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @staticmethod
    def _raised(context: dict[str, Any], on_error: Callable[[BaseException], None]) -> None:
        if context.get("exception") is not None:
            on_error(context["exception"])

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self.loop), return_exceptions=True))
        self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the gang is over
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        self.post(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def descriptors(self) -> list[int]:
        """Return what the loop listens to, and with what."""
        if self.loop.is_closed():
            return []
        own = getattr(self._selector, "fileno", None)  # epoll has one
        return [*self._selector.get_map(), *([own()] if own is not None else [])]


_loops: weakref.WeakSet[_LoopThread] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Let go of all channels in a child that the task has forked.

    It may outlive the task, whose end is seen by its closed connections. Nothing is unregistered, since the task
    goes on with the same epoll instance. The numbers stay taken, by the null device, since objects that believe
    to own them may yet close them.
    """
    numbers = [number for thread in _loops for number in thread.descriptors()]
    if numbers:
        null = os.open(os.devnull, os.O_RDWR)
        with limit_of_at_least(max(numbers) + 1):
            for number in numbers:
                os.dup2(null, number, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_in_forked_child)


class _Link(asyncio.Protocol):
    """One connection.

    What arrives goes, piece by piece, into a talk: a generator that yields how many bytes it needs next.
    Its end hangs up, and so does a ValueError, which says what was wrong with the last piece.
    """

    def __init__(self, talk: Callable[[_Link], Talk], on_end: Callable[[_Link], None]) -> None:
        self._talk = talk(self)
        self._on_end = on_end
        self._buffer = bytearray()
        self._needed = 0
        self._transport: asyncio.Transport | None = None
        self.opened_at = self.heard_at = time.monotonic()
        self.beat_at = 0.0
        self.node: int | None = None  # who it is, when that is proven
        self.why: str | None = None  # why we have hung up, if we have
        self.has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._needed = next(self._talk)

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        self._buffer += data
        try:
            while len(self._buffer) >= self._needed and not self.is_closing():
                piece = bytes(self._buffer[: self._needed])
                del self._buffer[: self._needed]
                self._needed = self._talk.send(piece)
        except StopIteration:
            self.close()
        except ValueError as error:
            self.hang_up(f"its connection was closed, because what came over it can't be understood: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        self._on_end(self)

    def is_closing(self) -> bool:
        """Tell whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is ending."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what is still to be sent, then end."""
        if self._transport is not None:
            self._transport.close()

    def hang_up(self, why: str) -> None:
        """End at once."""
        if self._transport is not None:
            self.why = self.why or why
            self._transport.abort()

    def address(self, whose: str) -> str:
        """Return the IP address of this side (``"sockname"``) or of the other (``"peername"``)."""
        assert self._transport is not None
        return plain_address(self._transport.get_extra_info(whose)[0])


class ControlChannel:
    """The control node's end: holds the gang and, for more than one node, listens.

    Parameters
    ----------
    gang : Gang
        Its state machine; from now on only the channel's thread touches it.
    deliver : callable
        Takes the messages for the control node itself; called in the channel's thread.
    token : str
        The gang's secret.
    heartbeat_timeout_s : float
        A member silent for so long is lost.

    Attributes
    ----------
    gang : Gang
        As given; to be read only, from other threads.
    """

    def __init__(self, gang: Gang, deliver: Deliver, token: str, heartbeat_timeout_s: float) -> None:
        self._deliver = deliver
        self._token = token
        self._timeout_s = heartbeat_timeout_s
        self._listening: socket.socket | None = None
        self._is_accepting = False
        self._files: OpenFiles | None = None
        self._places = 0
        self._links: set[_Link] = set()
        self._strangers: dict[
            _Link, None
        ] = {}  # those of them that have proven nothing yet, in the order of their coming
        self._members: dict[int, _Link] = {}
        self._opening: set[asyncio.Task[Any]] = set()
        self._reached_at: str | None = None
        self._has_failed = False
        self._is_closing = False
        self.gang = gang
        self._thread = _LoopThread("torchrun-control", self._fail)
        self._thread.post(self._tick)

    def listen(self, port: int | None, host: str = "") -> int:
        """Open the channel and return its port.

        Parameters
        ----------
        port : int or None
            None lets the kernel choose.
        host : str, optional
            Local address to listen on; default is all interfaces.

        Raises
        ------
        GangError
            If the port can't be listened on, or there can't be a connection for each node.
        """
        try:
            return int(self._thread.call(self._listen(port, host), _CLOSE_S))
        except OSError as error:
            raise GangError(
                f"The control node (host {socket.gethostname()}) can't listen on channel port {port}: {error}. Choose "
                "another with @torchrun(channel_port=...), or leave it out: the kernel then chooses a free one."
            ) from error

    def send(self, message: Message) -> None:
        """Hand a message of the control node itself to the gang."""
        self._thread.post(self._handle, CONTROL, message)

    def report_gone(self, node: int, reason: str) -> None:
        """Tell the gang that a node's task has ended; safe to call for one that left before."""
        # A little later, so that the node's own last words, which say more, come first.
        self._thread.post(self._call_gone_later, node, reason)

    def _call_gone_later(self, node: int, reason: str) -> None:
        self._thread.loop.call_later(_TICK_S * 2, self._gone, node, reason)

    def _gone(self, node: int, reason: str) -> None:
        self._do(lambda: self.gang.lost(node, reason))

    def close(self, wait_s: float) -> None:
        """Wait until the members have left, `wait_s` seconds at most, and close."""
        deadline = time.monotonic() + wait_s
        while self.gang.members and time.monotonic() < deadline:
            time.sleep(_TICK_S / 4)
        with suppress(Exception):
            self._thread.call(self._shut(), _CLOSE_S)
        self._thread.stop()

    # --- in the channel's thread: the gang ------------------------------------------------------

    def _tick(self) -> None:
        try:
            self._do(self.gang.tick)
            self._look_after_links()
            self._look_after_strangers()
        finally:
            self._thread.loop.call_later(_TICK_S, self._tick)

    def _handle(self, node: int, message: Message) -> None:
        self._do(lambda: self.gang.handle(node, message))

    def _do(self, step: Callable[[], Sequence[Outgoing]]) -> None:
        """Let the gang take a step and send what it says; what is raised there must not vanish."""
        try:
            self._dispatch(step())
        except Exception as error:
            self._fail(error)

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        encoded: Message | None = None
        frame = b""
        for node, message in outgoing:
            if node == CONTROL:
                self._deliver(_with_own_address(message, self._reached_at))
            elif node in self._members:
                if message is not encoded:  # the same message for all is made into bytes once
                    encoded, frame = message, encode(message)
                self._members[node].write(frame)

    def _fail(self, error: BaseException) -> None:
        """Tell all nodes that the channel itself has failed, which is a mistake of ours; the first time only."""
        if self._has_failed or self._is_closing:
            return
        self._has_failed = True
        trace = "".join(traceback.format_exception(error)).rstrip()
        told = GangError(
            f"The gang's channel failed on the control node (host {socket.gethostname()}). This is a mistake of the torchrun "
            f"extension; please report it.\n{trace}"
        )
        try:
            self._dispatch(self.gang.give_up(told))
        except Exception:  # not even that can be sent: the members see their connections end
            for link in self._members.values():
                link.hang_up("the channel failed")
            self._deliver({"type": "abort", "error": to_wire(told)})

    # --- in the channel's thread: connections ---------------------------------------------------

    async def _listen(self, port: int | None, host: str) -> int:
        self._files = OpenFiles(self.gang.num_nodes - 1, _MAX_STRANGERS)
        self._places = self._files.places
        self._listening = _listening_socket(port or 0, host)
        self._listening.setblocking(False)
        self._accept_from_now_on(True)
        return int(self._listening.getsockname()[1])

    def _accept_from_now_on(self, accepting: bool) -> None:
        if self._listening is not None and accepting != self._is_accepting:
            self._is_accepting = accepting
            if accepting:
                self._thread.loop.add_reader(self._listening, self._accept)
            else:
                self._thread.loop.remove_reader(self._listening)

    def _accept(self) -> None:
        assert self._listening is not None
        assert self._files is not None
        accepted = self._files.accept(self._listening, min(self._places - len(self._links), _ACCEPT_AT_ONCE))
        if not accepted:
            self._accept_from_now_on(False)  # no place, or none in the whole system; the next tick tries again
        for sock in accepted:
            sock.setblocking(False)
            link = _Link(self._talk, self._ended)
            self._links.add(link)
            self._strangers[link] = None
            opening = self._thread.loop.create_task(self._open(sock, link))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, link: _Link) -> None:
        try:
            await self._thread.loop.connect_accepted_socket(lambda: link, sock)
        except OSError:  # it is gone already
            self._ended(link)

    def _talk(self, link: _Link) -> Talk:
        """Let a newcomer prove that it knows the token, and serve it."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        link.write(_MAGIC + nonce)
        answer = yield _NONCE_BYTES + _MAC_BYTES
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(self._token, b"member", nonce)):
            return
        del self._strangers[link]
        link.write(_mac(self._token, b"control", theirs))
        hello = yield from _frame()
        if hello.get("type") != "join" or not isinstance(hello.get("node"), int):
            return
        if self.gang.may_join(hello["node"], hello):
            self._take_in(link, hello)
        elif not self._turn_away(link, hello):
            return
        while True:
            message = yield from _frame()
            if message.get("type") != "beat" and self._members.get(hello["node"]) is link:
                self._handle(hello["node"], message)

    def _turn_away(self, link: _Link, hello: Message) -> bool:
        """Tell a newcomer why it gets no place, and whether it shall stay connected until the gang's end."""
        error, hold_s, outgoing = self.gang.turn_away(hello["node"], hello)
        link.write(encode({"type": "refused", "error": to_wire(error), "hold_s": hold_s}))
        self._do(lambda: outgoing)
        if hold_s:
            self._begin_beating(link, hello["node"])
        return hold_s > 0

    def _begin_beating(self, link: _Link, node: int) -> None:
        link.node = node
        link.beat_at = time.monotonic() + random.random() * self._timeout_s / _BEATS  # noqa: S311 - not all at once

    def _take_in(self, link: _Link, hello: Message) -> None:
        """Give a newcomer that has proven itself its place; one that comes again has lost its connection."""
        node = hello["node"]
        self._begin_beating(link, node)
        before, self._members[node] = self._members.get(node), link
        if before is not None:
            before.hang_up("it has connected once more")
        self._reached_at = self._reached_at or link.address("sockname")
        self._handle(node, hello)

    def _ended(self, link: _Link) -> None:
        self._links.discard(link)
        self._strangers.pop(link, None)
        node = link.node
        if node is not None and self._members.get(node) is link:
            del self._members[node]
            if not self._is_closing:
                closed = "its connection to the control node was closed: its task ended or was killed"
                self._do(lambda: self.gang.lost(node, link.why or closed))

    def _look_after_links(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if now - link.heard_at > self._timeout_s:
                link.hang_up(_silence(self._timeout_s))
            elif link.node is not None and now >= link.beat_at:
                link.beat_at = now + self._timeout_s / _BEATS
                link.write(_BEAT)

    def _look_after_strangers(self) -> None:
        """Hang up on those who say nothing. A member's words that have arrived were read before, however busy we are."""
        has_places = len(self._links) < self._places
        patience_s = _HANDSHAKE_S if has_places else _HURRY_S
        for link in self._strangers:
            if time.monotonic() - link.opened_at < patience_s:
                break  # the others came later
            link.hang_up("it has not proven that it is a member")
        self._accept_from_now_on(has_places)

    async def _shut(self) -> None:
        self._is_closing = True
        if self._listening is not None:
            self._accept_from_now_on(False)
            self._listening.close()
        for link in self._links:
            link.close()
        deadline = time.monotonic() + _FLUSH_S
        while self._links and time.monotonic() < deadline:
            await asyncio.sleep(_FLUSH_S / 100)
        for link in self._links:
            link.hang_up("the gang is over")


class MemberChannel:
    """A member's end.

    Parameters
    ----------
    node : int
        This node's index.
    deliver : callable
        Takes the control node's messages, and ``{"type": "control_lost", "reason": ...}`` when the
        connection ends; called in the channel's thread.
    heartbeat_timeout_s : float
        A control node silent for so long is lost.

    Attributes
    ----------
    turned_away : bool
        Whether the control node has refused to take this node in, so that it makes no sense to try again.
    hold_s : float
        How long this task shall then put off its end, unless the connection ends before.
    no_listener : bool
        Whether in the last round of tries nobody listened there: every connection was refused.
    """

    def __init__(self, node: int, deliver: Deliver, heartbeat_timeout_s: float) -> None:
        self._node = node
        self._deliver = deliver
        self._timeout_s = heartbeat_timeout_s
        self._link: _Link | None = None  # the one of which the control node knows who we are
        self._answer: asyncio.Future[bool] | None = None
        self._is_over = False
        self._join = {
            "type": "join",
            "node": node,
            "host": socket.gethostname(),
            "task": secrets.token_hex(8),
            "place": place(),
        }
        self._obstacles: list[BaseException | None] = []  # of this round; only the channel's thread touches it
        self.turned_away = self.no_listener = False
        self.hold_s = 0.0
        self._thread = _LoopThread("torchrun-member", self._fail)

    def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Connect to the control node, be taken in, and return the address that worked.

        Addresses are tried in order, each a moment after the one before and beside it, again and again,
        until one proves that it knows the token.

        Raises
        ------
        TorchrunError
            If none did within `timeout_s` seconds, or if the control node does not take this node in.
        """
        try:
            # The control node has longer than that for its answer to *join*.
            patience_s = timeout_s + self._timeout_s + _CLOSE_S
            return str(self._thread.call(self._connect(addresses, port, token, timeout_s), patience_s))
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise GangError(
                f"Node {self._node} (host {socket.gethostname()}) can't reach the control node: tried "
                f"{', '.join(addresses)} on port {port} for {timeout_s:g} s. Check that network policies and security "
                "groups let the nodes connect to each other; @torchrun(channel_port=...) pins the port."
            ) from error

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self._thread.post(self._send, message)

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):
            self._thread.call(self._shut(), _CLOSE_S)
        self._thread.stop()

    # --- in the channel's thread ----------------------------------------------------------------

    async def _connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        pause = 0.05
        while True:
            self._obstacles.clear()
            link = await self._first_to_open(addresses, port, token, deadline)
            self.no_listener = _all_refused(self._obstacles)
            if link is not None and await self._is_taken_in(link):
                return link.address("peername")
            if time.monotonic() + pause > deadline:
                raise TimeoutError
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - or thousands would come again as one
            pause = min(pause * 2, _RETRY_LIMIT_S)

    async def _first_to_open(self, addresses: Sequence[str], port: int, token: str, deadline: float) -> _Link | None:
        """Knock at all addresses, each a moment after the one before, and return the first connection that stands."""
        stagger_s = min(_STAGGER_S, _ALL_TRIED_S / len(addresses))
        left, knocking = list(addresses), set[asyncio.Task[_Link | None]]()
        try:
            while left or knocking:
                if left:
                    knocking.add(asyncio.ensure_future(self._knock(left.pop(0), port, token)))
                wait_s = max(0.0, deadline - time.monotonic())
                done, _ = await asyncio.wait(
                    knocking, timeout=min(wait_s, stagger_s) if left else wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and time.monotonic() >= deadline:
                    return None
                for knock in done:
                    knocking.discard(knock)
                    if (opened := knock.result()) is not None:
                        return opened
            return None
        finally:
            await _give_up(knocking)

    async def _knock(self, address: str, port: int, token: str) -> _Link | None:
        """Connect and let both sides prove that they know the token; return None if that fails."""
        loop = asyncio.get_running_loop()
        proven: asyncio.Future[bool] = loop.create_future()
        link = _Link(lambda link: self._talk(link, token, proven), lambda link: self._ended(link, proven))
        is_proven = False
        try:
            await asyncio.wait_for(loop.create_connection(lambda: link, address, port), _CONNECT_S)
            is_proven = await asyncio.wait_for(proven, _CONNECT_S)
            self._obstacles.append(None)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            self._obstacles.append(error)
        finally:
            if not is_proven:
                link.hang_up("")
        return link if is_proven else None

    def _talk(self, link: _Link, token: str, proven: asyncio.Future[bool]) -> Talk:
        greeting = yield len(_MAGIC) + _NONCE_BYTES
        if not greeting.startswith(_MAGIC):
            return  # another service answers there
        nonce = secrets.token_bytes(_NONCE_BYTES)
        link.write(nonce + _mac(token, b"member", greeting[len(_MAGIC) :]))
        if not hmac.compare_digest((yield _MAC_BYTES), _mac(token, b"control", nonce)):
            return  # it does not know this gang's token
        if not proven.done():
            proven.set_result(True)
        while True:
            message = yield from _frame()
            if message.get("type") != "beat":
                self._hear(link, message)

    async def _is_taken_in(self, link: _Link) -> bool:
        """Say who we are, and tell whether the control node takes us in; if the connection ends first, it has not.

        From here on there is no other try beside this one, or the control node would see its member vanish.
        """
        self._link, self._answer = link, asyncio.get_running_loop().create_future()
        link.write(encode(self._join))
        if link.is_closing():
            return False
        try:
            taken_in = await asyncio.wait_for(self._answer, self._timeout_s)
        except asyncio.TimeoutError:
            self._link = None
            link.hang_up("")
            raise GangError(
                f"Node {self._node} (host {socket.gethostname()}) reached the control node, but got no answer within "
                f"{self._timeout_s:g} s (heartbeat_timeout_s). See the control node's log."
            ) from None
        if taken_in:
            # From a random moment on, or thousands that came at once would beat at once.
            delay_s = random.random() * self._timeout_s / _BEATS  # noqa: S311 - no secret
            self._thread.loop.call_later(delay_s, self._beat, link)
        return taken_in

    def _hear(self, link: _Link, message: Message) -> None:
        if link is not self._link or self._answer is None:
            return  # nothing is said before *join*
        if message.get("type") == "refused":
            self.turned_away, self.hold_s = True, float(message.get("hold_s", 0.0))
            self._is_over = not self.hold_s
            if not self._answer.done():
                self._answer.set_exception(from_wire(message["error"]))
            if self.hold_s:
                self._beat(link)
            return
        if not self._answer.done():
            self._answer.set_result(True)
        self._deliver(_with_own_address(message, link.address("sockname")))

    def _beat(self, link: _Link) -> None:
        if time.monotonic() - link.heard_at > self._timeout_s:
            link.hang_up(_silence(self._timeout_s))
        elif not link.is_closing():
            link.write(_BEAT)
            self._thread.loop.call_later(self._timeout_s / _BEATS, self._beat, link)

    def _ended(self, link: _Link, proven: asyncio.Future[bool]) -> None:
        if not proven.done():
            proven.set_result(False)
        if link is self._link and self._answer is not None:
            if self._answer.done():
                self._lose_control(link.why or "its connection was closed: its task ended or was killed")
            else:
                self._answer.set_result(False)

    def _lose_control(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._deliver({"type": "control_lost", "reason": reason})

    def _fail(self, error: BaseException) -> None:
        """Something of ours has failed in the channel's thread: the step must hear of it, and the control node, too."""
        what = "".join(traceback.format_exception_only(error)).strip()
        self._lose_control(f"this node's own channel failed, which is a mistake of the torchrun extension: {what}")
        if self._link is not None:
            self._link.hang_up("the channel failed")

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.write(encode(message))

    async def _shut(self) -> None:
        self._is_over = True
        if self._link is not None:
            self._link.close()
            deadline = time.monotonic() + _FLUSH_S
            while not self._link.has_ended and time.monotonic() < deadline:
                await asyncio.sleep(_FLUSH_S / 100)
            self._link.hang_up("the gang is over")


def _all_refused(obstacles: Sequence[BaseException | None]) -> bool:
    """Tell whether nobody listens at any address; a name that is not known any more says nothing else."""
    kinds = {type(obstacle) for obstacle in obstacles}
    return ConnectionRefusedError in kinds and kinds <= {ConnectionRefusedError, socket.gaierror}


async def _give_up(knocking: set[asyncio.Task[_Link | None]]) -> None:
    """Stop knocking, and close what has opened at the same moment as another."""
    for knock in knocking:
        knock.cancel()
    for opened in await asyncio.gather(*knocking, return_exceptions=True):
        if isinstance(opened, _Link):
            opened.hang_up("")


def _frame() -> Generator[int, bytes, Message]:
    """Read one frame, as a part of a talk."""
    return decode((yield length_of((yield LENGTH.size))))


def _mac(token: str, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def _silence(timeout_s: float) -> str:
    return f"nothing was heard from it for {timeout_s:g} s (heartbeat_timeout_s)"


def _with_own_address(message: Message, address: str | None) -> Message:
    """Add to *go* this host's address between it and the others, which a connection alone tells for sure."""
    return {**message, "own_address": address} if address and message.get("type") == "go" else message


def _listening_socket(port: int, host: str) -> socket.socket:
    """Return a socket that listens on `port` of `host`; ``""`` is every interface, IPv4 and, where there is, IPv6."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError as error:
            if error.errno in PORT_TAKEN:
                raise  # by IPv6 alone, perhaps: then nobody would get here by IPv6
            # IPv6 can be compiled in and switched off
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
