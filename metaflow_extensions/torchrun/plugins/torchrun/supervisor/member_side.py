"""A member's side: its end of the connection to the control node.

Everything here runs in the supervisor's loop. `own_address` is set before `connect` ends, and not after.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from functools import partial

from ..gang.limits import ALL_ADDRESSES_S, ATTEMPT_S, NEXT_ADDRESS_S
from ..gang.messages import Answer, Ended, Join, Leave, Message
from .connection import Connection, close_all, encode
from .output import Output, Send
from .relay import LineSender
from .side import Side


class MemberSide(Side):
    """A node other than the control node."""

    def __init__(
        self,
        tell_task: Send,
        output: Output,
        node: int,
        num_nodes: int,
        timeout_s: float,
    ) -> None:
        super().__init__(node, num_nodes, tell_task, output)
        self.is_member = False  # whether this node has joined
        self._timeout_s = timeout_s  # a control node silent for so long is lost
        self._join = Join(node, self.host, secrets.token_hex(8))
        self._connection: Connection | None = None  # the first that has passed the handshake
        self._lines = LineSender(
            self._write, lambda: self._connection is not None and self._connection.has_room, num_nodes
        )
        self._is_over = False
        self._loop = asyncio.get_running_loop()

    # --- what its task and its launches ask ---------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        if isinstance(message, Ended | Leave):
            self._lines.send_all()  # so that they stand in the log before what comes next
        self._write(message)

    def _write(self, message: Message) -> None:
        try:
            if self._connection is not None:
                self._connection.write(encode(message))
        except ValueError as error:  # it is too long
            self.fail(error)

    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers."""
        self._lines.add(stream, text)

    async def close(self, wait_s: float = 0.0) -> None:
        """Send what is still to be sent, and close the connection; there is nobody to wait for."""
        self._is_over = True
        if self._connection is not None:
            await close_all([self._connection])

    end = close

    def fail(self, error: BaseException) -> None:
        """Report an exception in the loop to the step, and abort the connection so that the control node sees the loss."""
        what = f"{type(error).__name__}: {error}"
        self._lose(f"this node's own channel failed, which is a bug in metaflow-torchrun: {what}")
        if self._connection is not None:
            self._connection.abort()

    # --- to become a member -----------------------------------------------------------------------

    async def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Try all addresses once, join over the first that works, and return it.

        Raises OSError if none works or it is too early; then it can be called again. Raises TorchrunError if the control
        node turns this node away.
        """
        self._connection = None
        connection = await self._first_to_prove(addresses, port, token, min(timeout_s, ATTEMPT_S))
        connection.write(encode(self._join))
        try:
            answer = await asyncio.wait_for(connection.receive(), self._timeout_s)
        except asyncio.TimeoutError:
            connection.abort()
            text = f"the control node was reached, but gave no answer within {self._timeout_s:g} s"
            raise TimeoutError(f"{text} (heartbeat_timeout_s); see its log") from None
        except EOFError:
            raise ConnectionError("the connection ended before the control node answered") from None
        error = answer.error if isinstance(answer, Answer) else None  # of any other the step hears
        if isinstance(answer, Answer) and answer.is_early:
            connection.abort()
            raise ConnectionError("" if error is None else error.message)
        self.own_address = connection.address("sockname")
        self.deliver(answer)
        self._is_over = error is not None
        connection.attend(self.deliver, partial(self._ended, connection))
        self._watch(connection)
        if error is not None:
            raise error
        self.is_member = True
        return connection.address("peername")

    async def _first_to_prove(self, addresses: Sequence[str], port: int, token: str, limit_s: float) -> Connection:
        """Try all addresses, each a moment after the one before; who passes the handshake first wins."""
        stagger_s = min(NEXT_ADDRESS_S, ALL_ADDRESSES_S / len(addresses))
        attempts = [
            asyncio.ensure_future(self._attempt(address, port, token, limit_s, number * stagger_s))
            for number, address in enumerate(addresses)
        ]
        errors = []
        for attempt in asyncio.as_completed(attempts):
            if (error := await attempt) is None:
                break
            errors.append(error)
        for each in attempts:
            each.cancel()
        if self._connection is None:
            raise _summary(errors)
        return self._connection

    async def _attempt(self, address: str, port: int, token: str, limit_s: float, begin_in_s: float) -> OSError | None:
        """Connect, and have both sides prove that they know the token; return why that has failed."""
        await asyncio.sleep(begin_in_s)
        connection = Connection(self._timeout_s)
        unknown = ConnectionError("the process that answers there does not know this gang's token")
        try:
            await asyncio.wait_for(self._loop.create_connection(lambda: connection, address, port), limit_s)
            if not await asyncio.wait_for(connection.shake_hands_as_member(token), limit_s):
                return unknown
            # Only one may join: the control node would take the end of another one for this member's end.
            self._connection = self._connection or connection
            return None
        except EOFError:
            return unknown
        except asyncio.TimeoutError:  # no OSError before Python 3.11
            return TimeoutError(f"no answer within {limit_s:.2g} s")
        except ValueError as error:  # it can't be a name
            return OSError(str(error))
        except OSError as error:
            return error
        finally:
            if connection is not self._connection:
                connection.abort()

    # --- as a member ----------------------------------------------------------------------------

    def _ended(self, connection: Connection) -> None:
        self._lose(connection.why_aborted or "its connection was closed: its supervisor process or its machine is gone")

    def _watch(self, connection: Connection) -> None:
        """Check in a timer whether the control node is silent; call it once, it repeats itself."""
        again_at = connection.beat()
        if not connection.is_closing():
            self._loop.call_at(again_at, self._watch, connection)  # the loop's clock is the monotonic one

    def _lose(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self.lose_control(reason)


def _summary(errors: Sequence[OSError]) -> OSError:
    """Return one error for all addresses: that nobody listens, or else the first that says more."""
    # A name that is not known any more says nothing about the control node.
    telling = [error for error in errors if not isinstance(error, socket.gaierror)]
    return next((error for error in telling if not isinstance(error, ConnectionRefusedError)), (telling or errors)[0])
