"""A member's end of the gang's connections.

Everything here runs in the supervisor's loop, which also calls `deliver` and `on_loss`. `hold_s` and `own_address` are
set before `connect` ends, and not after.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import traceback
from collections.abc import Callable, Sequence

from ..gang.messages import Answer, Beat, Join, Message
from ..gang.policy import ConnectPolicy
from .connection import Connection, Reading, close_all, handshake_as_member, next_message
from .frames import encode


class MemberChannel:
    """A member's end of its connection to the control node."""

    def __init__(
        self,
        node: int,
        deliver: Callable[[Message], None],
        on_loss: Callable[[str], None],
        heartbeat_timeout_s: float,
        policy: ConnectPolicy | None = None,
        place: str = "",  # see `Join`
    ) -> None:
        # How long a refused task delays its end, unless the connection ends before.
        self.hold_s = 0.0
        self.own_address: str | None = None  # between it and the control node
        self._deliver = deliver
        self._on_loss = on_loss  # called once, with the reason, when the control node is lost
        self._timeout_s = heartbeat_timeout_s  # a control node silent for so long is lost
        self._policy = policy or ConnectPolicy()
        self._join = Join(node, socket.gethostname(), secrets.token_hex(8), place)
        self._connection: Connection | None = None  # the one over which *join* was sent
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[None] = self._loop.create_future()  # to *join*

    # --- what the supervisor asks -----------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        try:
            if self._connection is not None:
                self._connection.write(encode(message))
        except ValueError as error:  # it is too long, however much it is shortened
            self.fail(error)

    @property
    def has_room(self) -> bool:
        """Whether the network has taken all that was sent."""
        return self._connection is not None and not self._connection.unsent_bytes

    async def close(self) -> None:
        """Close the connection."""
        self._is_over = True
        if self._connection is not None:
            await close_all([self._connection])

    def fail(self, error: BaseException) -> None:
        """Report an exception in the loop to the step, and abort the connection so that the control node sees the loss."""
        what = "".join(traceback.format_exception_only(error)).strip()
        self._lose_control(f"this node's own channel failed, which is a bug in metaflow-torchrun: {what}")
        if self._connection is not None:
            self._connection.abort()

    # --- to become a member -----------------------------------------------------------------------

    async def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Try all addresses once, join over the first that works, and return it.

        Raises OSError if none works or it is too early, a ConnectionRefusedError if nobody listens at any; then it can
        be called again. Raises TorchrunError if the control node turns this node away.
        """
        attempt_s = min(timeout_s, self._policy.attempt_s)
        connection = await self._first_to_open(addresses, port, token, attempt_s)
        if connection.is_closing():
            raise ConnectionError("the connection ended at once")
        # Send *join*, and wait for the control node's answer. It ends the connection of a node that shall try again.
        self._connection, self._answer = connection, self._loop.create_future()
        connection.write(encode(self._join))
        try:
            await asyncio.wait_for(self._answer, self._timeout_s)
        except asyncio.TimeoutError:
            self._connection = None
            connection.abort()
            text = f"the control node was reached, but gave no answer within {self._timeout_s:g} s"
            raise TimeoutError(f"{text} (heartbeat_timeout_s); see its log") from None
        return connection.address("peername")

    async def _first_to_open(self, addresses: Sequence[str], port: int, token: str, attempt_s: float) -> Connection:
        """Try all addresses, each a moment after the one before, and return the first connection that stands.

        Once it stands no other attempt goes on: the control node would take the end of a second connection for
        this member's end.
        """
        stagger_s = min(self._policy.next_address_s, self._policy.all_addresses_s / len(addresses))
        attempts = [
            asyncio.ensure_future(self._attempt(address, port, token, attempt_s, number * stagger_s))
            for number, address in enumerate(addresses)
        ]
        first: Connection | None = None
        errors: list[OSError] = []
        for attempt in asyncio.as_completed(attempts):
            try:
                first = await attempt
                break
            except OSError as error:
                errors.append(error)
        for other in attempts:
            other.cancel()
        for opened in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(opened, Connection) and opened is not first:  # at the same moment as another
                opened.abort()
        if first is None:
            raise _summary(errors)
        return first

    async def _attempt(self, address: str, port: int, token: str, limit_s: float, begin_in_s: float) -> Connection:
        """Connect, and have both sides prove that they know the token."""
        await asyncio.sleep(begin_in_s)
        loop = self._loop
        is_proven: asyncio.Future[bool] = loop.create_future()
        connection = Connection(
            lambda connection: self._dialogue(connection, token, is_proven),
            lambda connection: self._ended(connection, is_proven),
            self._timeout_s,
        )
        works = False
        try:
            await asyncio.wait_for(loop.create_connection(lambda: connection, address, port), limit_s)
            works = await asyncio.wait_for(is_proven, limit_s)
        except asyncio.TimeoutError:  # no OSError before Python 3.11
            raise TimeoutError(f"no answer within {limit_s:.2g} s") from None
        except ValueError as error:  # it can't be a name
            raise OSError(str(error)) from error
        finally:
            if not works:
                connection.abort()
        if not works:
            raise ConnectionError("the process that answers there does not know this gang's token")
        return connection

    def _dialogue(self, connection: Connection, token: str, is_proven: asyncio.Future[bool]) -> Reading[None]:
        if not (yield from handshake_as_member(connection, token)):
            return
        if not is_proven.done():
            is_proven.set_result(True)
        while True:
            message = yield from next_message()
            if isinstance(message, Beat):
                connection.answer_beat()
            else:
                self._handle(connection, message)

    # --- as a member ----------------------------------------------------------------------------

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection is not self._connection:
            return  # nothing is said before *join*
        if not self._answer.done():
            self._watch(connection)
            if not isinstance(message, Answer):
                self._answer.set_result(None)  # the step hears it
            elif message.is_early:
                self._connection = None
                self._answer.set_exception(ConnectionError("" if message.error is None else message.error.message))
                connection.abort()
                return
            elif message.error is not None:
                self.hold_s, self._is_over = message.hold_s, not message.hold_s
                self._answer.set_exception(message.error)
            else:
                self.own_address = connection.address("sockname")
                self._answer.set_result(None)
        self._deliver(message)

    def _watch(self, connection: Connection) -> None:
        """Check in a timer whether the control node is silent; call it once, it repeats itself."""
        again_at = connection.beat()
        if not connection.is_closing():
            self._loop.call_at(again_at, self._watch, connection)  # the loop's clock is the monotonic one

    def _ended(self, connection: Connection, is_proven: asyncio.Future[bool]) -> None:
        if not is_proven.done():
            is_proven.set_result(False)
        if connection is self._connection and not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection ended before the control node answered"))
        elif connection is self._connection:
            self._lose_control(
                connection.why_closed or "its connection was closed: its supervisor process or its machine is gone"
            )

    def _lose_control(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_loss(reason)


def _summary(errors: Sequence[OSError]) -> OSError:
    """Return one error for all addresses: that nobody listens, or else the first that says more."""
    # A name that is not known any more says nothing about the control node.
    telling = [error for error in errors if not isinstance(error, socket.gaierror)]
    return next((error for error in telling if not isinstance(error, ConnectionRefusedError)), (telling or errors)[0])
