"""Reads the usage of this node's NVIDIA GPUs from ``nvidia-smi``, which comes with the driver.

It can take long, hang on a broken device, or print anything. So nothing waits for it: one poll starts it, and a later
poll reads its output. NVML in this process would be faster, but nobody could end a hanging call.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from ..machine.processes import HELPERS

_QUERY = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total")
_EVERY_S = 15.0  # each run takes a part of a second of CPU
_AFTER_FAILURE_S = 60.0
_LIMIT_S = 20.0  # it takes seconds if the driver is loaded for each run
_FRESH_S = 120.0  # a result is valid this long
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Gpus:
    """The usage of some GPUs together; None means unknown, as for a slice of a GPU (MIG)."""

    count: int
    percent: float | None  # of the time in which a kernel ran, on average over the GPUs
    memory_mib: float | None
    memory_total_mib: float | None


class NvidiaSmi:
    """Reads the usage of the GPUs in `wanted`, named as in ``CUDA_VISIBLE_DEVICES``."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = tuple(wanted)
        self._program = shutil.which("nvidia-smi") if wanted else None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._due_at = float("-inf")
        self._found: tuple[float, Gpus] | None = None  # with the start time of that run

    def look(self, now: float) -> Gpus | None:
        """Return the last valid result, and start the program again if that is due. Returns at once."""
        if self._process is not None:
            self._collect(self._process, now)
        elif self._program is not None and now >= self._due_at:
            self._ask(self._program, now)
        return self._found[1] if self._found is not None and now - self._found[0] <= _FRESH_S else None

    def close(self) -> None:
        """Kill the program; who reaps orphans reaps it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            HELPERS.discard(process.pid)
            process.returncode = -signal.SIGKILL
            _stdout(process).close()

    def _ask(self, program: str, now: float) -> None:
        self._started_at, self._due_at = now, now + _AFTER_FAILURE_S
        with suppress(OSError):
            self._process = subprocess.Popen(
                [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not end it
            )
            HELPERS.add(self._process.pid)
            os.set_blocking(_stdout(self._process).fileno(), False)

    def _collect(self, process: subprocess.Popen[bytes], now: float) -> None:
        if process.poll() is None:
            if now - self._started_at > _LIMIT_S:
                process.kill()  # a later poll finds it ended, unless the kernel holds it
            return
        self._process = None
        HELPERS.discard(process.pid)
        # Normal output fits into a pipe. A program that writes more blocks, and is killed.
        with _stdout(process) as pipe:
            text = (pipe.read(_MOST_BYTES) or b"").decode(errors="replace")
        found = parse(text, self._wanted) if process.returncode == 0 else None
        if found is not None:
            self._found = self._started_at, found
            self._due_at = self._started_at + _EVERY_S


def parse(text: str, wanted: Sequence[str]) -> Gpus | None:
    """Return the usage of the wanted GPUs from the program's output; None if it has none of them."""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    ours = [row for row in rows if len(row) == len(_QUERY) and _is_wanted(row[0], row[1], wanted)]
    if not ours:
        return None
    percent, used, total = (_sum([row[column] for row in ours]) for column in (2, 3, 4))
    return Gpus(len(ours), None if percent is None else percent / len(ours), used, total)


def _is_wanted(index: str, uuid: str, wanted: Sequence[str]) -> bool:
    """Return whether a list as in ``CUDA_VISIBLE_DEVICES`` has a GPU: by number, or by the first part of its UUID."""
    return any(each == index or (each.startswith("GPU-") and uuid.startswith(each)) for each in wanted)


def _sum(texts: list[str]) -> float | None:
    """Return the sum of numbers; None if one is no number, such as "[N/A]"."""
    return float(sum(map(int, texts))) if all(text.isdecimal() for text in texts) else None


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout
