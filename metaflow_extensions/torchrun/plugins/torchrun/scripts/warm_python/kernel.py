"""What a warm process needs of Linux and Python does not offer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36
# The fields of `struct prctl_mm_map` that ``/proc/self/stat`` tells, by their places there, counted from 1 (proc(5)).
_MM_PLACES = {"start_code": 26, "end_code": 27, "start_data": 45, "end_data": 46, "start_brk": 47, "start_stack": 28}


class _MemoryMap(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_libc = ctypes.CDLL(None)
_kept: list[ctypes.Array[ctypes.c_char]] = []  # what the kernel reads as long as this process lives


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans(do: bool) -> None:
    """Become the parent of every descendant of this process whose own parent ends; or let others be it again."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(do), 0, 0, 0)


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def umask() -> int:
    """Return the umask of this process, without changing it for its other threads (Linux 4.7)."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        fields = dict(line.partition(":")[::2] for line in file)
    if "Umask" in fields:
        return int(fields["Umask"], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


def show_as(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Have ``/proc`` show these as this process's command line and environment, as those of a program that was started.

    The kernel allows it to every process where it was built with CONFIG_CHECKPOINT_RESTORE (5.10: kernel/sys.c,
    prctl_set_mm). Elsewhere ``/proc`` goes on to show those of the warm process.
    """
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            line = file.read()
        after_name = line.rpartition(")")[2].split()  # its first is the third of all
        known = {name: int(after_name[place - 3]) for name, place in _MM_PLACES.items()}
        shown = [_as_block(command), _as_block([f"{name}={value}" for name, value in env.items()])]
        starts = [ctypes.addressof(block) for block in shown]
        ends = [start + len(block) - 1 for start, block in zip(starts, shown, strict=True)]  # less C's own last byte
        brk = _libc.sbrk
        brk.restype = ctypes.c_uint64
        places = _MemoryMap(**known, brk=brk(0), exe_fd=0xFFFFFFFF)  # no other program file
        places.arg_start, places.env_start = starts
        places.arg_end, places.env_end = ends
        size = ctypes.sizeof(places)
        if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(places), ctypes.c_ulong(size), 0) == 0:
            _kept[:] = shown


def _as_block(words: Sequence[str]) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(b"".join(os.fsencode(word) + b"\0" for word in words))
