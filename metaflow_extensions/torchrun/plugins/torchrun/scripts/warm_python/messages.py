"""How a warm process is asked for a program, and what it answers. Its clients run in other processes.

A request is one byte, and with it open files: the request itself as JSON, then the standard output and the standard
error of the program. So it has any size, nobody waits for a reader, and no environment is written to a disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from typing import Any

_MARK = b"?"
_MAX_ANSWER = 65536
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC in <linux/memfd.h>


class Refused(Exception):
    """The warm process does not become this program; the text says why."""


def in_words(error: BaseException) -> str:
    """Return why there is no program, whatever kept it from being there."""
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"


def ask(server: socket.socket, request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Ask for a program; the files stay the caller's."""
    described = in_memory(request)
    try:
        socket.send_fds(server, [_MARK], [described, stdout, stderr])
    finally:
        os.close(described)


def in_memory(request: dict[str, Any]) -> int:
    """Return a file that holds a request and has no name."""
    file = _memory_file()
    with open(file, "w", encoding="ascii", closefd=False) as text:
        json.dump(request, text)
    return file


def _memory_file() -> int:
    name = "torchrun-request"
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # A Python that was built for an old C library lacks it, as conda-forge's; the C library that it runs with may not.
    file: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _CLOSE_ON_EXEC)
    if file < 0:
        raise OSError(ctypes.get_errno(), "no file could be made in memory")
    return file


def read_request(file: int) -> dict[str, Any]:
    """Return what `in_memory` has written, and close the file."""
    with open(file, encoding="ascii") as text:
        text.seek(0)
        request: dict[str, Any] = json.load(text)
        return request


def next_request(client: socket.socket) -> tuple[dict[str, Any], int, int] | None:
    """Wait for a request; return it and the files for the program's output, or None if there is no client any more."""
    data, files, _, _ = socket.recv_fds(client, len(_MARK), 3)
    if not data:
        return None
    described, stdout, stderr = files
    return read_request(described), stdout, stderr


def answer(client: socket.socket, pid: int, refusal: str = "") -> None:
    """Tell the client the pid of the program, or why there is none."""
    client.sendall(json.dumps([pid, refusal[: _MAX_ANSWER // 8]]).encode() + b"\n")


def read_answer(server: socket.socket) -> int:
    """Return the pid of the program; raises `Refused`, or EOFError if the warm process has ended."""
    data = b""
    while not data.endswith(b"\n"):
        part = server.recv(_MAX_ANSWER)
        if not part:
            raise EOFError("the warm process has ended")
        data += part
    pid, refusal = json.loads(data)
    if refusal:
        raise Refused(refusal)
    return int(pid)
