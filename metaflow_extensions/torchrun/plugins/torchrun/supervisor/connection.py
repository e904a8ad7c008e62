"""One connection between the control node and a member: handshake, frames, heartbeats.

First both sides prove, by HMAC-SHA256 over the other's nonce, that they know the gang's token. Nothing else is read of a
connection before that. Then frames follow: four bytes of length, big endian, and a message as JSON. Their length has a
limit, far above what messages have: the texts of causes, lines and stacks are bounded where they arise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import secrets
import struct
import time
from collections.abc import Callable, Collection

from ..gang.messages import Beat, Message, from_wire, to_wire
from ..machine.packets import dump

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1024 * 1024
_MAGIC = b"mf-torchrun/1\0\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
BEATS = 5
"""How many heartbeats are sent in the time after which silence means loss."""
_FLUSH_S, _LOOK_S = 1.0, 0.01
_NEVER = float("inf")


class Connection(asyncio.Protocol):
    """One connection. A coroutine reads what it begins with; `attend` has what follows handled.

    So of thousands that are silent for hours, none holds a coroutine.
    """

    def __init__(
        self, heartbeat_timeout_s: float, on_begin: Callable[[Connection], None] = lambda connection: None
    ) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._on_begin = on_begin
        self._come = bytearray()
        self._waiter: asyncio.Future[None] | None = None  # of the coroutine that reads
        self._handle: Callable[[Message], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._checked_at = self.opened_at = time.monotonic()
        self._beat_at = _NEVER  # when the next heartbeat is due
        self.node: int | None = None  # on the control node: the member at the other end, once it has joined
        self.why_aborted: str | None = None  # by this side
        self.has_ended = False

    # --- called by asyncio ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._on_begin(self)

    def data_received(self, data: bytes) -> None:
        """Hand on what has come."""
        self._heard_at = time.monotonic()
        self._come += data
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end of the connection."""
        self.has_ended = True
        self._wake()
        self._on_end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        while self._handle is not None and (message := self._next()) is not None:
            self._handle(message)

    # --- called by the channels -----------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def has_room(self) -> bool:
        """Whether the network has taken all that was sent."""
        return self._transport is not None and not self._transport.get_write_buffer_size()

    async def receive(self) -> Message:
        """Return the next message; raise EOFError at the end, which comes at once if this side has aborted it."""
        while (message := self._next()) is None:
            await self._more()
        return message

    def attend(self, handle: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Have each message handled when it comes, and `on_end` called after the last; nobody may call `receive` then."""
        self._handle, self._on_end = handle, on_end
        self._wake()
        if self.has_ended:
            on_end()

    def _next(self) -> Message | None:
        """Take a message, if one has come as a whole. A heartbeat is none; a member answers it."""
        try:
            while self.why_aborted is None and (frame := self._frame()) is not None:
                if not isinstance(message := decode(frame), Beat):
                    return message
                if self._beat_at == _NEVER:
                    self.write(BEAT)
        except (ValueError, RecursionError) as error:
            self.abort(f"its connection was closed, because a message on it could not be read: {error}")
        return None

    def _frame(self) -> bytes | None:
        if len(self._come) < LENGTH.size:
            return None
        (count,) = LENGTH.unpack_from(self._come)
        if count > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {count} bytes is over the limit of {MAX_FRAME_BYTES}")
        return self._take(LENGTH.size + count)[LENGTH.size :] if len(self._come) >= LENGTH.size + count else None

    async def _read(self, count: int) -> bytes:
        while len(self._come) < count:
            await self._more()
        return self._take(count)

    async def _more(self) -> None:
        if self.has_ended or self.why_aborted is not None:
            raise EOFError
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _take(self, count: int) -> bytes:
        taken = bytes(self._come[:count])
        del self._come[:count]
        return taken

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is ending."""
        if self._transport is not None and not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what is still to be sent, then end."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str = "") -> None:
        """End at once."""
        if self._transport is not None:
            self.why_aborted = self.why_aborted or why
            self._transport.abort()

    @property
    def is_proven(self) -> bool:
        """On the control node: whether the other end has proven that it knows the token."""
        return self._beat_at < _NEVER

    def beat(self) -> float:
        """Abort if the other side is silent, or send a heartbeat if it is time; return when to call this again.

        Call it in a timer of the loop. What has arrived is read before a timer runs, however busy we are: nobody is
        aborted for our own delay. And a timer that comes late tells that this process was stopped, perhaps with the
        whole machine, so that time counts for nobody. Only the control node sends heartbeats on its own account. A
        member answers each at once, while both are awake for it, and needs no timer for that.
        """
        now = time.monotonic()
        if now - self._checked_at > 2 * self._timeout_s / BEATS:
            self._heard_at = min(now, self._heard_at + now - self._checked_at)
        self._checked_at, silent_at = now, self._heard_at + self._timeout_s
        if now >= silent_at:
            self.abort(f"nothing arrived from it for {self._timeout_s:g} s (heartbeat_timeout_s)")
        elif now >= self._beat_at:
            self._beat_at = now + self._timeout_s / BEATS
            self.write(BEAT)
        return min(silent_at, now + self._timeout_s / BEATS)

    def address(self, whose: str) -> str:
        """Return the IP address of this side (``"sockname"``) or of the other (``"peername"``)."""
        assert self._transport is not None
        address: str = self._transport.get_extra_info(whose)[0]
        return address.removeprefix("::ffff:")  # so an IPv6 socket shows an IPv4 address

    # --- the handshake --------------------------------------------------------------------------

    async def shake_hands_as_control(self, token: str) -> bool:
        """Return whether the other side knows the token, and prove that we do."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.write(_MAGIC + nonce)
        answer = await self._read(_NONCE_BYTES + _MAC_BYTES)
        theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(token, b"member", nonce)):
            return False
        self.write(_mac(token, b"control", theirs))
        # The first heartbeat comes after a random time: thousands that began together would all send at one moment.
        self._beat_at = time.monotonic() + random.random() * self._timeout_s / BEATS  # noqa: S311 - no secret
        return True

    async def shake_hands_as_member(self, token: str) -> bool:
        """Prove that we know the token, and return whether the other side does."""
        greeting = await self._read(len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            return False  # another service answers there
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.write(nonce + _mac(token, b"member", greeting[len(_MAGIC) :]))
        return hmac.compare_digest(await self._read(_MAC_BYTES), _mac(token, b"control", nonce))


def _mac(token: str, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


async def close_all(connections: Collection[Connection]) -> None:
    """Send what is still to be sent, for a moment, and end the connections."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + _FLUSH_S
    while not all(connection.has_ended for connection in connections) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    for connection in connections:
        connection.abort("the gang is over")


# --- messages as frames ---------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return the frame of `message`; raise ValueError if it is too long."""
    wire = to_wire(message)
    data = dump(wire)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a {wire['type']!r} message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """Return the message of a frame, which is given without its length; raise ValueError if it is none."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("a frame must hold a JSON object")
    return from_wire(value)


BEAT = encode(Beat())
