"""Profiles a worker on demand: torch's server in it (`worker/process_groups`) runs torch's profiler for some seconds."""

from __future__ import annotations

import asyncio
import gzip
import os
from contextlib import suppress

from ..gang.wire import Plain
from ..machine.aside import Aside
from .torch_server import request
from .workers import Workers, worker_folder

_EXPORT_S = 120.0  # for the trace; torch holds the worker's GIL meanwhile
_PIECE = 1 << 20
MAX_BYTES = 512 * _PIECE
_DISK = Aside("torchrun-profile")


async def profile(workers: Workers, asked: str, rank: int, seconds: float) -> Plain | None:
    """Profile a rank, and have the task store the trace and report it; return why that can't be."""
    path, limit_s = os.path.join(workers.folder, f"profile-{asked}.json.gz"), seconds + _EXPORT_S
    why = "it does not run"
    if rank in workers.running():
        folder = worker_folder(workers.folder, rank - workers.call.global_rank(0))
        try:
            why = await _DISK.within(
                limit_s, lambda: asyncio.run(asyncio.wait_for(_fetch(folder, seconds, path), limit_s))
            )
        except (TimeoutError, asyncio.TimeoutError):  # they differ before Python 3.11
            why = f"it has not answered within {limit_s:g} s, or another profile is being made"
        except (FileNotFoundError, ConnectionError) as error:
            why = (
                f"it can't be asked ({error}): it has no process group, its PyTorch has no server for it, or a limit on "
                "processes leaves no room for one"
            )
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    if why:
        with suppress(OSError):
            os.unlink(path)
        return {"why": why}
    workers.side.tell_task("profile", path, asked, workers.go.launch, workers.go.generation)
    return None


async def _fetch(folder: str, seconds: float, path: str) -> str:
    """Write the trace to a file; return why there is none."""
    async with request(folder, f"torchrun_profile?duration={seconds:g}") as (status, body):
        if status != 200:
            return f"it can't: {(await body.read(_PIECE)).decode(errors='replace')[:300] or status}"
        size = 0
        with open(path, "wb") as raw, gzip.open(raw, "wb", compresslevel=1) as file:
            while piece := await body.read(_PIECE):
                size += len(piece)
                if size > MAX_BYTES:
                    return f"its trace is larger than {MAX_BYTES / _PIECE:g} MiB: profile fewer seconds"
                file.write(piece)
    return ""
