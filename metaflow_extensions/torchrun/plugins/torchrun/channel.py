"""Authenticated, framed messages between the control node and the members; heartbeats.

A connection begins with a fixed-length handshake in which both sides prove that they know the
gang's token, by HMAC-SHA256 over the other's nonce; nothing else is read from a stranger. Then
frames follow: four bytes of length, big endian, and so many bytes of JSON.

Each side runs one asyncio loop in a thread of its own. The control node's own supervisor talks to
the same `Gang` through the same loop, without a socket, so there is one code path for all nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from .errors import GangError
from .gang import Gang, Outgoing
from .launch_state import CONTROL, Message
from .network import PORT_TAKEN, plain_address

_MAGIC = b"mf-torchrun/1\0\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1024 * 1024
_HANDSHAKE_S = 10.0
# Strangers that connect and say nothing; when there are more at once, the oldest has to go.
_MAX_STRANGERS = 256
_BACKLOG = 1024
_TICK_S = 0.1
_CONNECT_S = 5.0
# How long an address is tried before the next one is tried beside it (RFC 8305), and within what
# time all are: a host can have many, and packets to the wrong ones may vanish without an answer.
_STAGGER_S = 0.25
_ALL_TRIED_S = 2.0
_RETRY_LIMIT_S = 2.0
_CLOSE_S = 5.0

Deliver = Callable[[Message], None]
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def new_token() -> str:
    """Return a fresh random token for one gang, as text."""
    return secrets.token_hex(32)


class _LoopThread:
    """An asyncio loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        # Not the kind that the step may have set as its policy: we must know the selector.
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        _loops.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
        for number in numbers:
            os.dup2(null, number, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_in_forked_child)


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
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._reached_at: str | None = None
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in the order of their coming
        self._server: asyncio.Server | None = None
        self.gang = gang
        self._thread = _LoopThread("torchrun-control")
        self._thread.post(self._start_ticking)

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
            If the port can't be listened on.
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
        self._dispatch(self.gang.lost(node, reason))

    def close(self, wait_s: float) -> None:
        """Wait until the members have left, `wait_s` seconds at most, and close."""
        deadline = time.monotonic() + wait_s
        while self.gang.members and time.monotonic() < deadline:
            time.sleep(_TICK_S / 4)
        with suppress(Exception):
            self._thread.call(self._shut(), _CLOSE_S)
        self._thread.stop()

    # --- in the channel's thread ----------------------------------------------------------------

    def _start_ticking(self) -> None:
        self._ticking = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self._dispatch(self.gang.tick())
            await asyncio.sleep(_TICK_S)

    async def _listen(self, port: int | None, host: str) -> int:
        sock = _listening_socket(port or 0, host)
        self._server = await asyncio.start_server(self._serve, sock=sock, backlog=_BACKLOG)
        return int(sock.getsockname()[1])

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            with suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)
            writer.close()

    def _handle(self, node: int, message: Message) -> None:
        self._dispatch(self.gang.handle(node, message))

    def _dispatch(self, outgoing: Sequence[Outgoing]) -> None:
        for node, message in outgoing:
            if node == CONTROL:
                self._deliver(_with_own_address(message, self._reached_at))
            elif node in self._writers:
                _write_frame(self._writers[node], message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            # Who has said nothing for longest: a member proves itself within milliseconds.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            hello = await asyncio.wait_for(self._greet(reader, writer), _HANDSHAKE_S)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            hello = None  # no member of this gang, whatever it was
        finally:
            self._strangers.pop(writer, None)
        if hello is not None and self.gang.may_join(hello["node"]):
            await self._attend(hello, reader, writer)
        writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
        """Let a newcomer prove that it knows the token; return its *join*, or None."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_MAGIC + nonce)
        answer = await reader.readexactly(_NONCE_BYTES + _MAC_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(self._token, b"member", nonce)):
            return None
        writer.write(_mac(self._token, b"control", theirs))
        hello = await _read_frame(reader)
        return hello if hello.get("type") == "join" and isinstance(hello.get("node"), int) else None

    async def _attend(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a member until it goes."""
        node = hello["node"]
        self._writers[node] = writer
        self._reached_at = self._reached_at or _local_address(writer)
        _keep_alive(writer)
        self._handle(node, hello)
        beats = asyncio.ensure_future(_beat(writer, self._timeout_s))
        reason = "its connection to the control node was closed: its task ended or was killed"
        try:
            while True:
                message = await asyncio.wait_for(_read_frame(reader), self._timeout_s)
                if message.get("type") != "beat":
                    self._handle(node, message)
        except asyncio.TimeoutError:
            reason = f"nothing was heard from it for {self._timeout_s:g} s (heartbeat_timeout_s)"
        except (OSError, EOFError, ValueError):
            pass
        finally:
            beats.cancel()
            self._writers.pop(node, None)
            self._dispatch(self.gang.lost(node, reason))


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
    """

    def __init__(self, node: int, deliver: Deliver, heartbeat_timeout_s: float) -> None:
        self._node = node
        self._deliver = deliver
        self._timeout_s = heartbeat_timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self._thread = _LoopThread("torchrun-member")

    def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Connect to the control node and return the address that worked.

        Addresses are tried in order, each a moment after the one before and beside it, again and again,
        until one proves that it knows the token.

        Raises
        ------
        GangError
            If none did within `timeout_s` seconds.
        """
        try:
            return str(self._thread.call(self._connect(addresses, port, token, timeout_s), timeout_s + _CLOSE_S))
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
            found = await self._first_to_open(addresses, port, token, deadline)
            if found is not None:
                reader, writer = found
                self._writer = writer
                _keep_alive(writer)
                _write_frame(writer, {"type": "join", "node": self._node, "host": socket.gethostname()})
                self._listening = asyncio.ensure_future(self._listen(reader, writer))
                return plain_address(writer.get_extra_info("peername")[0])
            if time.monotonic() + pause > deadline:
                raise TimeoutError
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_LIMIT_S)

    async def _first_to_open(
        self, addresses: Sequence[str], port: int, token: str, deadline: float
    ) -> _Connection | None:
        """Knock at all addresses, each a moment after the one before, and return the first connection that stands."""
        stagger_s = min(_STAGGER_S, _ALL_TRIED_S / len(addresses))
        left, knocking = list(addresses), set[asyncio.Task[_Connection | None]]()
        try:
            while left or knocking:
                if left:
                    knocking.add(asyncio.ensure_future(_knock(left.pop(0), port, token)))
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

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_address = _local_address(writer)
        beats = asyncio.ensure_future(_beat(writer, self._timeout_s))
        reason = "its connection was closed: its task ended or was killed"
        try:
            while True:
                message = await asyncio.wait_for(_read_frame(reader), self._timeout_s)
                if message.get("type") != "beat":
                    self._deliver(_with_own_address(message, own_address))
        except asyncio.TimeoutError:
            reason = f"nothing was heard from it for {self._timeout_s:g} s (heartbeat_timeout_s)"
        except (OSError, EOFError, ValueError):
            pass
        finally:
            beats.cancel()
            self._deliver({"type": "control_lost", "reason": reason})

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            _write_frame(self._writer, message)

    async def _shut(self) -> None:
        if self._writer is not None:
            with suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.drain(), 1.0)
            self._writer.close()


# --- knocking ---------------------------------------------------------------------------------


async def _knock(address: str, port: int, token: str) -> _Connection | None:
    """Connect and let both sides prove that they know the token; return None if that fails."""
    with suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
        return await asyncio.wait_for(_shake_hands(address, port, token), _CONNECT_S)
    return None


async def _shake_hands(address: str, port: int, token: str) -> _Connection:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        greeting = await reader.readexactly(len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            raise ValueError("another service answers there")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce + _mac(token, b"member", greeting[len(_MAGIC) :]))
        if not hmac.compare_digest(await reader.readexactly(_MAC_BYTES), _mac(token, b"control", nonce)):
            raise ValueError("it does not know this gang's token")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _give_up(knocking: set[asyncio.Task[_Connection | None]]) -> None:
    """Stop knocking, and close what has opened at the same moment as another."""
    for knock in knocking:
        knock.cancel()
    for opened in await asyncio.gather(*knocking, return_exceptions=True):
        if isinstance(opened, tuple):
            opened[1].close()


# --- frames -----------------------------------------------------------------------------------


def _mac(token: str, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def _write_frame(writer: asyncio.StreamWriter, message: Message) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a {message.get('type')} message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    writer.write(_LENGTH.pack(len(data)) + data)


async def _read_frame(reader: asyncio.StreamReader) -> Message:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("a frame must hold a JSON object")
    return message


async def _beat(writer: asyncio.StreamWriter, timeout_s: float) -> None:
    while True:
        await asyncio.sleep(timeout_s / 5)
        _write_frame(writer, {"type": "beat"})


def _with_own_address(message: Message, address: str | None) -> Message:
    """Add to *go* this host's address between it and the others, which a connection alone tells for sure."""
    return {**message, "own_address": address} if address and message.get("type") == "go" else message


def _local_address(writer: asyncio.StreamWriter) -> str:
    return plain_address(writer.get_extra_info("sockname")[0])


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


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
