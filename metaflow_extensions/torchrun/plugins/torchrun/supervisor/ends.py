"""Waits, in the loop, for the ends of processes that need be no children of this one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..gang.cause import describe_exit
from ..machine import processes

_LOOK_S, _LOOK_FOR_SURE_S = 0.25, 60.0  # without a pidfd, and with one


async def end_of(process: processes.Other) -> str:
    """Wait for the end of a process; return how it ended, in words."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    with process.end() as pidfd:
        if pidfd is not None:
            loop.add_reader(pidfd, told.set)
        try:
            while not process.has_ended:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(told.wait(), _LOOK_S if pidfd is None else _LOOK_FOR_SURE_S)
        finally:
            if pidfd is not None:
                loop.remove_reader(pidfd)
    now = processes.find(process.pid)
    if now is None or now.began != process.began or now.status is None:  # somebody has waited for it already
        return "ended"
    return describe_exit(now.status)
