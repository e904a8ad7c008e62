"""Who may connect to the control node: how many at once, and how long may they take to prove who they are.

All of this runs in the channel's thread, see `loop_thread`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from ..machine.network import listening_socket
from ..machine.open_files import room_for_connections
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
        port: int,
        host: str,
        num_members: int,
        token: str,
        heartbeat_timeout_s: float,
        serve: Callable[[Connection], Reading[None]],
        on_end: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._token = token
        self._timeout_s = heartbeat_timeout_s
        self._serve = serve
        self._on_end = on_end
        self._places = room_for_connections(num_members, _MAX_UNAUTHENTICATED)
        # In the order of their coming. The loop itself does not keep the tasks that open them.
        self._unauthenticated: dict[Connection, asyncio.Task[None]] = {}
        self.connections: set[Connection] = set()
        self._socket = listening_socket(port, host, _BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._accepts = True  # else the next tick tries again
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more; the connections stay."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    @property
    def is_busy(self) -> bool:
        """Whether somebody has still to prove who they are, or waits for a place."""
        return bool(self._unauthenticated) or not self._accepts

    def tick(self) -> None:
        """Send heartbeats, abort connections that are silent or stay unauthenticated, and accept again if there are places.

        One timer for all: each would wake the task.
        """
        for connection in self.connections:
            connection.beat()
        has_places = len(self.connections) < self._places
        patience_s = _HANDSHAKE_S if has_places else _HANDSHAKE_WHEN_FULL_S
        for connection in self._unauthenticated:
            if time.monotonic() - connection.opened_at < patience_s:
                break  # the others came later
            connection.abort("it has not proven that it is a member")
        if has_places and not self._accepts:
            self._accepts = True
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        most = min(self._places - len(self.connections), _ACCEPT_AT_ONCE)
        accepted: list[socket.socket] = []
        with suppress(OSError):  # nobody waits any more, or the system has no more files or memory
            while len(accepted) < most:
                accepted.append(self._socket.accept()[0])
        if not accepted:
            self._accepts = False
            self._loop.remove_reader(self._socket)  # no place, or none in the whole system
        for sock in accepted:
            sock.setblocking(False)
            connection = Connection(self._dialogue, self._ended, self._timeout_s)
            self.connections.add(connection)
            self._unauthenticated[connection] = self._loop.create_task(self._open(sock, connection))

    async def _open(self, sock: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # it is gone already
            self._ended(connection)

    def _ended(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        self._on_end(connection)

    def _dialogue(self, connection: Connection) -> Reading[None]:
        if (yield from handshake_as_control(connection, self._token)):
            del self._unauthenticated[connection]
            yield from self._serve(connection)
