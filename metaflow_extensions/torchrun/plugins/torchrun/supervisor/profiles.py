"""Profiles a worker on demand: torch's server in it (`worker/process_groups`) runs torch's profiler for some seconds."""

from __future__ import annotations

import gzip
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

from ..gang.wire import Plain
from ..machine.aside import Aside
from .recorders import SOCKET
from .workers import Workers, worker_folder

_EXPORT_S = 120.0  # for the trace, which the worker makes while it goes on
_PIECE = 1 << 20
MAX_BYTES = 512 * _PIECE
_DISK = Aside("torchrun-profile")


class _Worker(HTTPConnection):
    """A connection to the server of a worker with this folder."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        super().__init__("worker", timeout=timeout_s)
        self._folder = folder

    def connect(self) -> None:
        """Connect by the folder's descriptor: the whole path may be too long for a socket."""
        parent = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{parent}/{SOCKET}")
        finally:
            os.close(parent)


async def profile(workers: Workers, asked: Mapping[str, Any]) -> Plain | None:
    """Profile a rank, and have the task store the trace; return a report that says why that can't be."""
    rank, seconds = asked["rank"], asked["seconds"]
    path = os.path.join(workers.folder, f"profile-{asked['id']}.json.gz")
    why = f"rank {rank} does not run"
    if rank in workers.running():
        local_rank = rank - workers.call.global_rank(0)
        try:
            why = await _DISK.within(seconds + _EXPORT_S, _fetch, workers.folder, local_rank, seconds, path)
        except TimeoutError:
            why = f"rank {rank} has not answered within {seconds + _EXPORT_S:g} s, or another profile is being made"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    if why:
        with suppress(OSError):
            os.unlink(path)
        return {"id": asked["id"], "why": why}
    workers.side.tell_task("profile", path, asked["id"], workers.go.launch, workers.go.generation)
    return None


def _fetch(log_dir: str, local_rank: int, seconds: float, path: str) -> str:
    """Write the trace to a file; return why there is none."""
    worker = _Worker(worker_folder(log_dir, local_rank), seconds + _EXPORT_S)
    try:
        try:
            worker.request("POST", f"/handler/torchrun_profile?duration={seconds:g}")
        except OSError as error:
            return f"it can't be asked ({error}): it has no process group, or its PyTorch has no server for it"
        answer = worker.getresponse()
        if answer.status != 200:
            return f"its PyTorch can't: {answer.read(_PIECE).decode(errors='replace')[:300] or answer.status}"
        with open(path, "wb") as raw, gzip.open(raw, "wb", compresslevel=1) as file:
            size = 0
            while piece := answer.read(_PIECE):
                size += len(piece)
                if size > MAX_BYTES:
                    return f"its trace is larger than {MAX_BYTES / _PIECE:g} MiB: profile fewer seconds"
                file.write(piece)
    except HTTPException as error:
        return f"its answer can't be read: {error}"
    finally:
        with suppress(OSError):
            worker.close()
    return ""
