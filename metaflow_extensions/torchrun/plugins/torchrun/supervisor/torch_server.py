"""Asks torch's server in a worker, by HTTP on a unix socket; `worker/process_groups` starts it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SOCKET = "recorders"  # also in `worker/process_groups`


@asynccontextmanager
async def request(folder: str, handler: str) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Ask the worker with this folder; give the status of its answer, and what reads the rest.

    Raises
    ------
    OSError
        It has no server.
    ValueError, EOFError
        Its answer can't be read.
    """
    parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:  # the whole path may be too long for a socket
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{parent}/{SOCKET}")
    finally:
        os.close(parent)
    try:
        writer.write(f"POST /handler/{handler} HTTP/1.0\r\nHost: worker\r\nContent-Length: 0\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        yield int(head.split(maxsplit=2)[1]), reader
    finally:
        writer.close()
