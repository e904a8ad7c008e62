"""One connection between the control node and a member: handshake, frames, heartbeats.

It begins with a handshake of fixed length: both sides prove, by HMAC-SHA256 over the other's nonce, that they
know the gang's token. Nothing else is read of an unauthenticated connection. Then frames follow, see `frames`.
All of this runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import secrets
import time
from collections.abc import Callable, Collection, Generator
from typing import Any, TypeVar

from ..gang.messages import Beat, Message
from ..machine.network import plain_address
from .codec import Frames
from .frames import MAX_FRAME_BYTES, decode, encode

_MAGIC = b"mf-torchrun/1\0\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
BEAT = encode(Beat())
BEATS = 5
"""How many heartbeats are sent in the time after which silence means loss."""
_FLUSH_S = 1.0
_NEVER = float("inf")

T = TypeVar("T")
Reading = Generator["int | None", Any, T]
"""Reads from a connection: yields how many bytes it needs next, or None for a frame, is sent that, and returns a `T`."""


def new_token() -> str:
    """Return a fresh random token for one gang, as text."""
    return secrets.token_hex(32)


class Connection(asyncio.Protocol):
    """One connection. The coroutine `dialogue` reads from it until it ends."""

    def __init__(
        self,
        dialogue: Callable[[Connection], Reading[None]],
        on_end: Callable[[Connection], None],
        heartbeat_timeout_s: float,
        last_words: Callable[[Connection, str], bytes] = lambda connection, why: b"",
    ) -> None:
        self._last_words = last_words  # what a silent other side is told before the end
        self._dialogue = dialogue(self)  # its return closes the connection, a ValueError aborts it
        self._on_end = on_end  # called once
        self._timeout_s = heartbeat_timeout_s
        self._frames = Frames(MAX_FRAME_BYTES)
        self._needed: int | None = 0
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._checked_at = self.opened_at = time.monotonic()
        self._owes_beat = False
        self._beat_at = _NEVER  # when the next heartbeat is due
        self.node: int | None = None  # on the control node: the member at the other end, once it has joined
        self.why_closed: str | None = None  # why this side has aborted it, if it has
        self.has_ended = False

    # --- called by asyncio ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the dialogue."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._needed = next(self._dialogue)

    def data_received(self, data: bytes) -> None:
        """Pass what is complete to the dialogue."""
        self._heard_at = time.monotonic()
        self._frames.add(data)
        try:
            while not self.is_closing() and (piece := self._frames.take(self._needed)) is not None:
                self._needed = self._dialogue.send(piece)
        except StopIteration:
            self.close()
        except ValueError as error:
            self.abort(f"its connection was closed, because a message on it could not be read: {error}")
        if self._owes_beat:
            self._owes_beat = False
            self.write(BEAT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, once."""
        self.has_ended = True
        self._on_end(self)

    # --- called by the channels -----------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """How much waits here until the network takes it."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is ending."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what is still to be sent, then end."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str = "") -> None:
        """End at once."""
        if self._transport is not None:
            self.why_closed = self.why_closed or why
            self._transport.abort()

    def answer_beat(self) -> None:
        """Answer a heartbeat when all that has arrived is handled.

        After a pause the other side may be gone: the first answer has the kernel reset the connection, and a second one
        would end it before the other side's last words are read.
        """
        self._owes_beat = True

    @property
    def is_proven(self) -> bool:
        """On the control node: whether the other end has proven that it knows the token."""
        return self._beat_at < _NEVER

    def begin_beating(self) -> None:
        """Have `beat` send heartbeats, the first after a random time.

        Otherwise thousands of connections that began together would all send at the same moment.
        """
        self._beat_at = time.monotonic() + random.random() * self._timeout_s / BEATS  # noqa: S311 - no secret

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
            why = f"nothing arrived from it for {self._timeout_s:g} s (heartbeat_timeout_s)"
            self.write(self._last_words(self, why))
            self.abort(why)
        elif now >= self._beat_at:
            self._beat_at = now + self._timeout_s / BEATS
            self.write(BEAT)
        return min(silent_at, now + self._timeout_s / BEATS)

    def address(self, whose: str) -> str:
        """Return the IP address of this side (``"sockname"``) or of the other (``"peername"``)."""
        assert self._transport is not None
        return plain_address(self._transport.get_extra_info(whose)[0])


async def close_all(connections: Collection[Connection]) -> None:
    """Send what is still to be sent, for a moment, and end the connections."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + _FLUSH_S
    while not all(connection.has_ended for connection in connections) and time.monotonic() < deadline:
        await asyncio.sleep(_FLUSH_S / 100)
    for connection in connections:
        connection.abort("the gang is over")


# --- what is read ---------------------------------------------------------------------------------


def handshake_as_control(connection: Connection, token: str) -> Reading[bool]:
    """Return whether the other side knows the token, and prove that we do."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.write(_MAGIC + nonce)
    answer = yield _NONCE_BYTES + _MAC_BYTES
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(token, b"member", nonce)):
        return False
    connection.write(_mac(token, b"control", theirs))
    connection.begin_beating()
    return True


def handshake_as_member(connection: Connection, token: str) -> Reading[bool]:
    """Prove that we know the token, and return whether the other side does."""
    greeting = yield len(_MAGIC) + _NONCE_BYTES
    if not greeting.startswith(_MAGIC):
        return False  # another service answers there
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.write(nonce + _mac(token, b"member", greeting[len(_MAGIC) :]))
    proof = yield _MAC_BYTES
    return hmac.compare_digest(proof, _mac(token, b"control", nonce))


def _mac(token: str, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\0" + nonce, hashlib.sha256).digest()


def next_message() -> Reading[Message]:
    """Read one frame."""
    return decode((yield None))
