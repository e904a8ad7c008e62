"""Signs that a task must end: the processes that have started it are gone, or its machine or pod is about to go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..machine.pods import told_to_stop
from ..machine.processes import Process, send_signal
from .control_side import ControlSide
from .ends import Held, end_of
from .member_side import MemberSide

_LOOK_S = 0.25  # Metaflow's pods have two seconds between SIGTERM and SIGKILL, unless the deletion sets more
_ORPHAN_S = 1.5  # for a task whose run is gone to end by itself; its output has no reader any more


class Signs:
    """Looks for them for one task, `about` as `task/signs` tells it; the task hears why it must end."""

    def __init__(self, task: Process, about: Mapping[str, Any], side: ControlSide | MemberSide) -> None:
        self._task, self._about, self._side = task, about, side
        starters = {"run": self._run_is_gone, "control": self._control_task_is_gone}
        self._looking = Held()
        for role, each in about["starters"].items():
            self._looking.begin(starters[role](*each))
        if about["looks"]:
            self._looking.begin(self._look())

    def close(self) -> None:
        """Look no more."""
        self._looking.cancel()

    async def _run_is_gone(self, pid: int, began: str) -> None:
        """Wait for the end of the run's process: then nothing waits for this task any more, or reads its output."""
        await end_of(Process(pid, began))
        self._side.tell_task("must_end", f"the process of the run (pid {pid}) is gone")
        await self._kill_after(_ORPHAN_S)

    async def _control_task_is_gone(self, pid: int, began: str) -> None:
        await end_of(Process(pid, began))
        if self._side.is_member:  # its channel tells it; what its workers still write is read
            await self._kill_after(self._about["patience_s"])
        else:
            self._side.say(
                "note", f"the control task (pid {pid}), which has started this one, is gone; this one ends, too"
            )
            await self._kill_after(0.0)

    async def _kill_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not self._task.has_ended:
            send_signal(self._task.pid, signal.SIGKILL)  # its main thread may be in a call that nothing interrupts

    async def _look(self) -> None:
        why, file = None, self._about["notice_file"]
        while why is None:
            await asyncio.sleep(_LOOK_S)
            why = told_to_stop(self._about["shell"]) or (_spot_notice(file) if file else None)
        self._side.tell_task("must_end", why)


def _spot_notice(path: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not there yet
        return None
    when = lines[0].strip() if lines else ""
    return f"a spot notice says that its machine will be taken away ({when or 'no date'})"
