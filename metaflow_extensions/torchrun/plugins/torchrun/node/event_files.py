"""How the scalars in TensorBoard's event files get to where the metrics of rank 0 are read.

A process of its own reads them (``scripts/event_file_reader.py``), since TensorBoard's reader takes a second to import and
50 MB. It has the lowest priority, it writes to a file, and nobody waits for it but for a moment at the end.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from contextlib import suppress

from ..launch.command import SCRIPTS
from ..launch.spec import LaunchSpec

_SCRIPT = os.path.join(SCRIPTS, "event_file_reader.py")
_LAST_S = 5.0  # for what was written last
# File systems keep coarser times than clocks tell.
_MARGIN_S = 2.0

MISSING = (
    "warning: run(tensorboard=...) reads nothing: the package tensorboard is not installed where the task runs; "
    "pip install tensorboard"
)


def is_installed() -> bool:
    """Tell whether TensorBoard can be imported; imports nothing."""
    return importlib.util.find_spec("tensorboard") is not None


class EventFiles:
    """The process that reads event files while one generation runs."""

    def __init__(self, spec: LaunchSpec, lines: str) -> None:
        self._spec = spec
        self._lines = lines  # the file that it writes to
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to read, where the launch has asked for it; what keeps that from working is left to the log."""
        folder = self._spec.tensorboard
        if folder is None or self._spec.node_index != 0 or not is_installed():
            return
        words = [self._spec.python, _SCRIPT, folder, self._lines, str(time.time() - _MARGIN_S), str(os.getpid())]
        # It inherits the mask. So it loses no SIGTERM that comes before it can look at any.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with suppress(OSError), open(f"{self._lines}.stderr", "wb") as errors:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, cwd=self._spec.cwd
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take_complaint(self) -> str | None:
        """Return why it has ended by itself, once."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        self._process = None
        with suppress(OSError), open(f"{self._lines}.stderr", encoding="utf-8", errors="replace") as file:
            last = (file.read()[-2000:].strip().splitlines() or ["it has said nothing"])[-1]
            return f"warning: run(tensorboard=...) reads nothing any more: {last}"
        return None

    def close(self) -> None:
        """Have it read to the end, within 5 s; safe to call more than once."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.terminate()
        try:
            process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
