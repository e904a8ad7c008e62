"""A member's end of the gang's connections.

Who may touch what. The channel's thread runs one asyncio loop (`loop_thread`), and all that begins with an
underscore here belongs to that thread. From any other thread, `connect`, `send` and `close` hand their work to
it. `deliver` and `on_loss` are called in it. `hold_s` and `own_address` are set before `connect` ends, and not
after.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import TorchrunError
from ..machine.network import place
from .connection import Connection, Reading, handshake_as_member, next_message
from .frames import encode
from .loop_thread import CLOSE_S, LoopThread
from .policy import ConnectPolicy
from .protocol import Beat, Join, Message, Refused, Welcome

_FLUSH_S = 1.0


class MemberChannel:
    """A member's end."""

    def __init__(
        self,
        node: int,
        deliver: Callable[[Message], None],
        on_loss: Callable[[str], None],
        heartbeat_timeout_s: float,
        policy: ConnectPolicy | None = None,
    ) -> None:
        # How long a task that was turned away shall put off its end, unless the connection ends before.
        self.hold_s = 0.0
        self.own_address: str | None = None  # between it and the control node
        self._deliver = deliver
        self._on_loss = on_loss  # called once, with the reason, when the control node is lost
        self._timeout_s = heartbeat_timeout_s  # a control node silent for so long is lost
        self._policy = policy or ConnectPolicy()
        self._join = Join(node, socket.gethostname(), secrets.token_hex(8), place())
        self._connection: Connection | None = None  # the one over which *join* was sent
        self._answer: asyncio.Future[None] | None = None  # to *join*
        self._is_over = False
        self._thread = LoopThread("torchrun-member", self._fail)

    # --- called in other threads ----------------------------------------------------------------

    def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Try all addresses once, join over the first that works, and return it.

        Raises OSError if none works, a ConnectionRefusedError if nobody listens at any; then it can be called again.
        Raises TorchrunError if the control node turns this node away.
        """
        # The control node has longer than that for its answer to *join*.
        patience_s = timeout_s + self._timeout_s + CLOSE_S
        return str(self._thread.call(self._connect(addresses, port, token, timeout_s), patience_s))

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self._thread.post(self._send, message)

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):
            self._thread.call(self._close(), CLOSE_S)
        self._thread.stop()

    # --- in the channel's thread: to become a member --------------------------------------------

    async def _connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        connection = await self._first_to_open(addresses, port, token, time.monotonic() + timeout_s)
        await self._become_member(connection)
        return connection.address("peername")

    async def _first_to_open(self, addresses: Sequence[str], port: int, token: str, deadline: float) -> Connection:
        """Try all addresses, each a moment after the one before, and return the first connection that stands.

        Once it stands no other attempt goes on: the control node would take the end of a second connection for
        this member's end.
        """
        stagger_s = min(self._policy.next_address_s, self._policy.all_addresses_s / len(addresses))
        left = list(addresses)
        attempts: set[asyncio.Task[Connection]] = set()
        errors: list[OSError] = []
        try:
            while left or attempts:
                if left:
                    attempts.add(asyncio.ensure_future(self._attempt(left.pop(0), port, token)))
                wait_s = max(0.0, deadline - time.monotonic())
                done, _ = await asyncio.wait(
                    attempts, timeout=min(wait_s, stagger_s) if left else wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in done:
                    attempts.discard(attempt)
                    try:
                        return attempt.result()
                    except OSError as error:
                        errors.append(error)
                if not done and time.monotonic() >= deadline:
                    raise TimeoutError("no answer in time")
        finally:
            await _abandon(attempts)
        raise _summary(errors)

    async def _attempt(self, address: str, port: int, token: str) -> Connection:
        """Connect, and have both sides prove that they know the token."""
        loop = self._thread.loop
        is_proven: asyncio.Future[bool] = loop.create_future()
        connection = Connection(
            lambda connection: self._dialogue(connection, token, is_proven),
            lambda connection: self._ended(connection, is_proven),
            self._timeout_s,
        )
        works = False
        try:
            await asyncio.wait_for(loop.create_connection(lambda: connection, address, port), self._policy.attempt_s)
            works = await asyncio.wait_for(is_proven, self._policy.attempt_s)
        except asyncio.TimeoutError:  # no OSError before Python 3.11
            raise TimeoutError(f"no answer within {self._policy.attempt_s:g} s") from None
        except ValueError as error:  # it can't be a name
            raise OSError(str(error)) from error
        finally:
            if not works:
                connection.abort("")
        if not works:
            raise ConnectionError("who answers does not know the gang's token")
        return connection

    def _dialogue(self, connection: Connection, token: str, is_proven: asyncio.Future[bool]) -> Reading[None]:
        if not (yield from handshake_as_member(connection, token)):
            return
        if not is_proven.done():
            is_proven.set_result(True)
        while True:
            message = yield from next_message()
            if not isinstance(message, Beat):
                self._hear(connection, message)

    async def _become_member(self, connection: Connection) -> None:
        """Say who we are, and wait until the control node has taken us in."""
        self._connection, self._answer = connection, self._thread.loop.create_future()
        connection.write(encode(self._join))
        try:
            if connection.is_closing():
                raise ConnectionError("the connection ended at once")
            await asyncio.wait_for(self._answer, self._timeout_s)
        except asyncio.TimeoutError:
            self._give_up(connection)
            text = f"the control node was reached, but gave no answer within {self._timeout_s:g} s"
            raise TimeoutError(f"{text} (heartbeat_timeout_s); see its log") from None
        except OSError:
            self._give_up(connection)
            raise

    def _give_up(self, connection: Connection) -> None:
        self._connection = None
        connection.abort("")

    # --- in the channel's thread: as a member ---------------------------------------------------

    def _hear(self, connection: Connection, message: Message) -> None:
        if connection is not self._connection or self._answer is None:
            return  # nothing is said before *join*
        if isinstance(message, Refused):
            self._turned_away(connection, message.error, message.hold_s)
            return
        if isinstance(message, Welcome) and not self._answer.done():
            self.own_address = connection.address("sockname")
            self._answer.set_result(None)
            self._begin_beating(connection)
        self._deliver(message)

    def _turned_away(self, connection: Connection, error: TorchrunError, hold_s: float) -> None:
        self.hold_s = hold_s
        self._is_over = not hold_s
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if hold_s:
            self._begin_beating(connection)

    def _begin_beating(self, connection: Connection) -> None:
        connection.begin_beating()
        self._keep_alive(connection)

    def _keep_alive(self, connection: Connection) -> None:
        next_s = connection.keep_alive()
        if not connection.is_closing():
            self._thread.loop.call_later(next_s, self._keep_alive, connection)

    def _ended(self, connection: Connection, is_proven: asyncio.Future[bool]) -> None:
        if not is_proven.done():
            is_proven.set_result(False)
        if connection is not self._connection or self._answer is None:
            return
        if self._answer.done():
            self._lose_control(connection.why_closed or "its connection was closed: its task ended or was killed")
        else:
            self._answer.set_exception(ConnectionError("the connection ended before the control node answered"))

    def _lose_control(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_loss(reason)

    def _fail(self, error: BaseException) -> None:
        """Tell the step that something of ours has failed here; the control node sees the connection end."""
        what = "".join(traceback.format_exception_only(error)).strip()
        self._lose_control(f"this node's own channel failed, which is a mistake of the torchrun extension: {what}")
        if self._connection is not None:
            self._connection.abort("the channel failed")

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.write(encode(message))

    async def _close(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.close()
            deadline = time.monotonic() + _FLUSH_S
            while not self._connection.has_ended and time.monotonic() < deadline:
                await asyncio.sleep(_FLUSH_S / 100)
            self._connection.abort("the gang is over")


def _summary(errors: Sequence[OSError]) -> OSError:
    """Return one error for all addresses: that nobody listens, or else the first that says more."""
    # A name that is not known any more says nothing about the control node.
    telling = [error for error in errors if not isinstance(error, socket.gaierror)]
    return next((error for error in telling if not isinstance(error, ConnectionRefusedError)), (telling or errors)[0])


async def _abandon(attempts: set[asyncio.Task[Connection]]) -> None:
    """Stop connection attempts, and close what has opened at the same moment as another."""
    for attempt in attempts:
        attempt.cancel()
    for opened in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(opened, Connection):
            opened.abort("")
