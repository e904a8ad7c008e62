"""Accepts connections to the control node, with limits on their number and on the time for the handshake.

All of this runs in the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from ..machine.network import listening_socket
from ..machine.open_files import room_for_connections
from .connection import Connection

# How long a connection may take to prove who it is, and how long when all places are taken.
_HANDSHAKE_S = 10.0
_HANDSHAKE_WHEN_FULL_S = 2.0
# How many may be at the same moment, besides the members; more have to wait in the kernel's queue.
_MAX_UNAUTHENTICATED = 2048
_BACKLOG = 65535  # the kernel's own limit counts (net.core.somaxconn)
_FULL_PAUSE_S = 0.1  # between two checks for a free place


class Listener:
    """Accepts connections to one port, each made by `new_connection`."""

    def __init__(self, port: int, host: str, num_members: int, new_connection: Callable[[], Connection]) -> None:
        self._loop = asyncio.get_running_loop()
        self._new_connection = new_connection
        self._places = room_for_connections(num_members, _MAX_UNAUTHENTICATED)
        self.connections: set[Connection] = set()  # removed by the callback at a connection's end
        # asyncio keeps its tasks in a WeakSet (read in Python 3.11): without this set, one could vanish while it runs.
        self._opening: set[asyncio.Task[None]] = set()
        self._socket = listening_socket(port, host, _BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._accepting = self._loop.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more; the connections stay."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._socket.close()

    def tick(self) -> None:
        """Send heartbeats, and abort connections that are silent or do not prove who they are.

        One timer serves all connections, since each timer wakes the process.
        """
        patience_s = _HANDSHAKE_S if len(self.connections) < self._places else _HANDSHAKE_WHEN_FULL_S
        too_old = time.monotonic() - patience_s
        for connection in self.connections:
            if connection.is_proven:
                connection.beat()
            elif connection.opened_at < too_old:
                connection.abort("it has not proven that it is a member")

    async def _accept(self) -> None:
        while True:
            while len(self.connections) >= self._places:
                await asyncio.sleep(_FULL_PAUSE_S)
            try:
                sock, _ = await self._loop.sock_accept(self._socket)
            except OSError:  # the system has no more files or memory
                await asyncio.sleep(_FULL_PAUSE_S)
            else:
                connection = self._new_connection()
                self.connections.add(connection)
                task = self._loop.create_task(self._open(sock, connection))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:  # it is gone already
            self.connections.discard(connection)
