"""Writes our own lines to the task's stdout and stderr, whatever the step's code has put there.

What the workers write is the supervisor's (`supervisor/output`), but for a stream that only this process can write to.
Who writes here waits for the reader, as `print` does.
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from typing import TextIO

from ..errors import TorchrunError
from ..events import Event, event_text
from ..machine.streams import await_room, file_of, write_lines

_STUCK_S = 3.0  # for a reader that takes nothing, when this process was told to end
_LOOK_S = 0.5
_patience_s = float("inf")  # for a reader that takes nothing


def to_log(event: Event, num_nodes: int) -> None:
    """Write an event to the node's log, on stderr like Metaflow's own lines."""
    write("stderr", event_text(event, num_nodes))


def write(stream: str, text: str) -> None:
    """Write whole lines to `sys.stdout` or `sys.stderr`, after what other code has printed; dropped if that can't be."""
    target: TextIO | None = getattr(sys, stream)
    if not text or target is None:
        return
    try:
        fd = _descriptor(target)
        if fd is None:
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        with suppress(BlockingIOError):  # Python keeps what it could not write, for the next flush
            target.flush()
        if fd is not None:
            write_lines(fd, text.encode(errors="backslashreplace"), _await_room)
    except TorchrunError:  # an order to end
        raise
    except Exception:  # noqa: S110 - it is closed, nobody reads it, or it is an object of the step's code
        pass


def hurry() -> None:
    """Wait for no reader any more that takes nothing: this process was told to end."""
    global _patience_s
    _patience_s = _STUCK_S


def is_elsewhere(stream: str, own: tuple[int, int] | None) -> bool:
    """Return whether `sys.stdout` or `sys.stderr` does not write to the file `own`; see `file_of`."""
    target = getattr(sys, stream)
    fd = None if target is None else _descriptor(target)
    return fd is None or own is None or file_of(fd) != own


def _await_room(fd: int) -> None:
    global _patience_s
    began = time.monotonic()
    while not await_room(fd, _LOOK_S):
        if time.monotonic() - began > _patience_s:
            _patience_s = 0.0  # the next text does not wait for it again
            raise TimeoutError("its reader takes nothing")


def _descriptor(target: TextIO) -> int | None:
    # A stream that somebody else has put there, as a notebook, a tee or a compressed file, may have one as well, but
    # wants the text.
    with suppress(OSError, ValueError):
        if isinstance(target, io.TextIOWrapper):
            buffer = target.buffer
            return target.fileno() if isinstance(getattr(buffer, "raw", buffer), io.FileIO) else None
    return None
