"""Recognises failures caused by a full disk or by the kernel's out-of-memory killer."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace

from ..gang.cause import Cause, describe_exit
from ..machine.memory import describe_oom, oom_kills

# A disk with less free space than this can't take another block.
_FULL_BYTES = 64 * 1024


class MachineFaults:
    """Faults of this machine since this object was made, which is when a generation starts."""

    def __init__(self, folder: str) -> None:
        self._folder = folder  # where the workers' output goes
        self._oom_kills_before = oom_kills()
        self.full_disk = f"a full disk: nothing more can be written to {folder}"

    def explained(self, cause: Cause) -> Cause:
        """Return `cause`, explained by the machine's state where the worker recorded no exception."""
        if cause.exception is None and self.is_disk_full():
            cause = replace(cause, exception=f"{self.full_disk}, where its output goes")
        if cause.kind == "signal" and self._is_out_of_memory(cause.exit_code):
            cause = replace(cause, kind="oom", exception=describe_oom())
        return cause

    def how_ended(self, exit_code: int) -> str:
        """Return in words how a process ended."""
        return f"ran {describe_oom()}" if self._is_out_of_memory(exit_code) else describe_exit(exit_code)

    def how_vanished(self) -> str:
        """Return in words how the guardian ended: it is no child of the task, so its exit code can't be read."""
        is_oom = self._is_out_of_memory(-signal.SIGKILL)
        return f"ran {describe_oom()}" if is_oom else "ended unexpectedly, as by SIGKILL"

    def is_disk_full(self) -> bool:
        """Return whether the disk with the workers' output is full."""
        with suppress(OSError):
            status = os.statvfs(self._folder)
            return status.f_bavail * status.f_frsize < _FULL_BYTES
        return False

    def _is_out_of_memory(self, exit_code: int | None) -> bool:
        """Return whether it was the kernel's out-of-memory killer: its counter has moved since *go*."""
        before, now = self._oom_kills_before, oom_kills()
        return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before
