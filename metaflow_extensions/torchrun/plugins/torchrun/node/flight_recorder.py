"""NCCL's flight recorder: how it is switched on, asked for a dump, and where its dumps lie."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..machine import processes

# All of torch 2.13 (torch/include/torch/csrc/distributed/c10d/ in the wheel). It knows both names of the size
# (FlightRecorder.hpp), but prints of the second on every rank that it is deprecated. Versions before 2.8 know only the
# second, and old ones (2.4 by its documentation) record nothing without it.
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RENAMED_IN = (2, 8)
_ENTRIES = "2000"
# A dump is written to this stem and the global rank (DebugInfoWriter in FlightRecorder.hpp); first wins.
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# What is written to the pipe <stem><global rank>.pipe requests a dump (DumpPipe in ProcessGroupNCCL.hpp).
_PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# With it (the default of 2.13, but not of old versions) NCCL's monitor looks at the pipe every second, without it
# every 8 minutes (HeartbeatMonitor::runLoop in ProcessGroupNCCL.cpp).
_MONITOR_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
# torchfrtrace infers the prefix if only dumps have names that end with digits
# (_determine_prefix in torch/distributed/flight_recorder/components/loader.py, torch 2.13).
_DUMP_STEM = "nccl_trace_rank_"

_SETTLED_S = 0.3  # a file that has not changed for so long is complete
_POLL_S = 0.05
_MISSING = (0, 0)  # size and time of change of a file that does not exist


def recorder_environment(folder: str, inherited: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Return the variables that switch the recorder on; what the user has set stays. See `stacks.hook_environment`."""
    defaults = {_MONITOR_VARIABLE: "1"}
    if not any(name in inherited for name in _SIZE_VARIABLES):
        found = re.match(r"(\d+)\.(\d+)", torch_version)
        is_old = found is not None and (int(found[1]), int(found[2])) < _RENAMED_IN
        defaults[_SIZE_VARIABLES[is_old]] = _ENTRIES
    if not any(name in inherited for name in _DUMP_VARIABLES):  # ours under one name would beat theirs under the other
        defaults.update(dict.fromkeys(_DUMP_VARIABLES, os.path.join(folder, _DUMP_STEM)))
    if _holds_pipes(folder):  # or NCCL's monitor thread would throw, which ends the worker
        defaults[_PIPE_VARIABLE] = os.path.join(folder, _DUMP_STEM)
    return {name: value for name, value in defaults.items() if name not in inherited}


def _holds_pipes(folder: str) -> bool:
    probe = os.path.join(folder, f".pipe-{os.getpid()}")
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return False
    return True


def request_dump(pid: int, rank: int, folder: str) -> FileChange | None:
    """Request a dump if there is a pipe; return the file to wait for."""
    pipe = os.path.join(folder, f"{_DUMP_STEM}{rank}.pipe")
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails if nobody reads
    except OSError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return None
        env = processes.environment(pid)  # the user may have chosen another file
        stem = next((env[name] for name in _DUMP_VARIABLES if env.get(name)), os.path.join(folder, _DUMP_STEM))
        dump = FileChange(os.path.join(f"/proc/{pid}/cwd", f"{stem}{rank}"))
        os.write(fd, b"dump\n")
        return dump
    except OSError:
        return None
    finally:
        os.close(fd)


def dumps_in(folder: str) -> list[str]:
    """Return the dumps that lie in `folder`."""
    return sorted(map(str, Path(folder).glob(f"{_DUMP_STEM}*[0-9]")))


class FileChange:
    """Waits for a file to change from what it is now."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._before = self._signature()
        self.former_size = self._before[0]  # in bytes

    def arrives(self, deadline: float) -> bool:
        """Wait until the file has changed and stays as it is; tell whether it has changed."""
        seen, since = self._before, time.monotonic()
        while (now := time.monotonic()) < deadline:
            current = self._signature()
            if current != seen:
                seen, since = current, now
            elif seen != self._before and seen[0] > 0 and now - since >= _SETTLED_S:
                return True
            time.sleep(_POLL_S)
        return seen not in (self._before, _MISSING)

    def _signature(self) -> tuple[int, int]:
        with suppress(OSError):
            found = os.stat(self.path)
            return found.st_size, found.st_mtime_ns
        return _MISSING
