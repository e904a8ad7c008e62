"""Writing to the task's own stdout and stderr so that Metaflow's terminal shows every line at once.

Metaflow's local runtime (``Worker.read_logline`` in ``metaflow/runtime.py``, 2.19) reads one line from a
buffered pipe each time the pipe has something to read. Of lines that arrive together it shows the
first; the others sit in its buffer, out of the poll's sight, until the next write. So, while the
output is a trickle, a line is written only when the reader has taken the one before. A flood is
written at once: there the next write is never far.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from typing import TextIO

_TRICKLE_LINES = 200  # in one go; a reader that takes 0.2 ms a line is through in 40 ms
_PATIENCE_S = 0.05  # with a reader that does not read; it is not waited for a second time
_LOOK_S = 0.0001


def write_output(stream: str, text: str) -> None:
    """Write whole lines of workers' output to the task's own stream.

    Parameters
    ----------
    stream : str
        ``"stdout"`` or ``"stderr"``.
    text : str
        Lines, the last one ended too.
    """
    target = sys.stdout if stream == "stdout" else sys.stderr
    patient = text.count("\n") <= _TRICKLE_LINES and _is_pipe(target)
    for line in text.splitlines(keepends=True) if patient else [text]:
        patient = patient and _await_reader(target)
        target.write(line)
        target.flush()


def _is_pipe(target: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(target.fileno()).st_mode)
    except (OSError, ValueError):  # replaced by something without a file, as in a notebook
        return False


def _await_reader(target: TextIO) -> bool:
    """Wait until the pipe is empty; return False if the reader takes too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while _unread_bytes(target):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _unread_bytes(target: TextIO) -> int:
    try:
        count: int = struct.unpack("i", fcntl.ioctl(target.fileno(), termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:  # not on this system: then lines come when they come
        return 0
    return count
