"""What the guardian needs of Linux and Python does not offer; elsewhere it does nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_IN_CREATE = 0x100  # <linux/inotify.h>
_IS_LINUX = sys.platform == "linux"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant of this process whose own parent ends."""
    if _IS_LINUX:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    if _IS_LINUX:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class FolderWatch:
    """Tells when something is made in one of some folders (inotify)."""

    def __init__(self) -> None:
        fd = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if _IS_LINUX else -1
        self.fd: int | None = fd if fd >= 0 else None  # readable when there is news; None without inotify

    def add(self, folders: Iterable[str]) -> None:
        """Watch more folders; those that are watched already or do not exist are ignored."""
        if self.fd is not None:
            for folder in folders:
                _libc().inotify_add_watch(self.fd, os.fsencode(folder), _IN_CREATE)

    def drain(self) -> None:
        """Take the news, so that `fd` is no longer readable."""
        if self.fd is not None:
            os.read(self.fd, 65536)
