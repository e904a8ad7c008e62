"""Who may connect to the control node: how many at once, and how long may they take to prove who they are.

All of this runs in the channel's thread, see `loop_thread`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from ..machine.network import listening_socket
from ..machine.open_files import OpenFiles
from .connection import Connection, Reading, handshake_as_control

# How long a connection may stay unauthenticated, and how long when all places are taken.
_HANDSHAKE_S = 10.0
_HANDSHAKE_WHEN_FULL_S = 2.0
# How many may be at the same moment, besides the members; more have to wait in the kernel's queue.
_MAX_UNAUTHENTICATED = 2048
_BACKLOG = 65535  # the kernel's own limit counts (net.core.somaxconn)
_ACCEPT_AT_ONCE = 256


class Listener:
    """Accepts connections, and has `serve` go on with the dialogue of those that know the token."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_members: int,
        connect: Callable[[Callable[[Connection], Reading[None]]], Connection],
        token: str,
        serve: Callable[[Connection], Reading[None]],
    ) -> None:
        self._loop = loop
        self._connect = connect  # makes a connection of a dialogue; who hears of its end calls `forget`
        self._token = token
        self._serve = serve
        self._files = OpenFiles(num_members, _MAX_UNAUTHENTICATED)
        self._socket: socket.socket | None = None
        self._is_accepting = False
        self._opening: set[asyncio.Task[Any]] = set()
        self._unauthenticated: dict[Connection, None] = {}  # in the order of their coming
        self.connections: set[Connection] = set()

    def listen(self, port: int, host: str) -> int:
        """Begin to accept connections and return the port; 0 lets the kernel choose it."""
        self._socket = listening_socket(port, host, _BACKLOG)
        self._socket.setblocking(False)
        self._accept_from_now_on(True)
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Accept no more; the connections stay."""
        if self._socket is not None:
            self._accept_from_now_on(False)
            self._socket.close()

    def forget(self, connection: Connection) -> None:
        """Free the place of a connection that has ended."""
        self.connections.discard(connection)
        self._unauthenticated.pop(connection, None)

    def tick(self) -> None:
        """Abort connections that stay unauthenticated, and accept again if there are places.

        What a member has sent was read before, however busy we are: it is not aborted for our own delay.
        """
        has_places = len(self.connections) < self._files.places
        patience_s = _HANDSHAKE_S if has_places else _HANDSHAKE_WHEN_FULL_S
        for connection in self._unauthenticated:
            if time.monotonic() - connection.opened_at < patience_s:
                break  # the others came later
            connection.abort("it has not proven that it is a member")
        self._accept_from_now_on(has_places)

    def _accept_from_now_on(self, accepting: bool) -> None:
        if self._socket is not None and accepting != self._is_accepting:
            self._is_accepting = accepting
            if accepting:
                self._loop.add_reader(self._socket, self._accept)
            else:
                self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        assert self._socket is not None
        most = min(self._files.places - len(self.connections), _ACCEPT_AT_ONCE)
        accepted = self._files.accept(self._socket, most)
        if not accepted:
            self._accept_from_now_on(False)  # no place, or none in the whole system; the next tick tries again
        for sock in accepted:
            sock.setblocking(False)
            connection = self._connect(self._dialogue)
            self.connections.add(connection)
            self._unauthenticated[connection] = None
            opening = self._loop.create_task(self._open(sock, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # it is gone already
            self.forget(connection)

    def _dialogue(self, connection: Connection) -> Reading[None]:
        if (yield from handshake_as_control(connection, self._token)):
            del self._unauthenticated[connection]
            yield from self._serve(connection)
