"""One node's commands of ``before_run``, in the place of a generation of workers.

They run in a process of ours (``worker/command_runner``), which stands where the agent stands. So a guardian watches
and ends them as it does workers, and the gang hears of them as of a launch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..gang.cause import Cause, describe_exit
from ..gang.protocol import Go, Ran
from ..launch.commands import for_process, shown
from .exits import Exits, end_of
from .generation import Generation
from .plan import Plan

COMMANDS_FILE = "commands.json"
_TAIL_LINES = 30


@dataclass(frozen=True)
class _Ended:
    """A command that has ended, or that could not be started."""

    number: int  # from 0
    status: int | None
    error: str | None
    seconds: float


def runner_command(plan: Plan, folder: str) -> list[str]:
    """Return the argv of what runs the commands of `plan`, and leave in `folder` what it needs."""
    commands = [{"argv": for_process(words), "shown": shown(words)} for words in plan.spec.commands or ()]
    with open(os.path.join(folder, COMMANDS_FILE), "w", encoding="ascii") as file:
        json.dump(commands, file)
    # Neither the variables of the commands nor what is installed may change what it does.
    return [plan.spec.python, "-I", "-S", plan.spec.entrypoint, folder]


class CommandGeneration(Generation):
    """The commands of one node, from *go* to their end."""

    def __init__(self, plan: Plan, host: str, go: Go, folder: str, *more: Any) -> None:
        super().__init__(plan, host, go, folder, *more)
        self.exits = Exits(folder, replace(plan.spec, nproc=0), host)  # it has no ranks
        self._commands = plan.spec.commands or ()
        self._told = 0

    def ran(self) -> Iterator[Ran]:
        """Yield what is to be told of the commands that have ended since the last time."""
        ended = self._ended()
        new, self._told = ended[self._told :], len(ended)
        for each in new:
            text = f"{self._name(each.number)} {self._how(each, self._told_exit)}"
            seconds = round(each.seconds, 3)
            yield Ran(self.go.launch, self.number, text, seconds, each.status)

    def _ended(self) -> list[_Ended]:
        with suppress(OSError), open(os.path.join(self.log_dir, "ended.jsonl"), encoding="ascii") as file:
            return [_Ended(**json.loads(line)) for line in file if line.endswith("\n")]
        return []

    def _failed(self) -> _Ended | None:
        return next((each for each in self._ended() if each.status != 0), None)

    def _name(self, number: int) -> str:
        return f"before_run {number + 1}/{len(self._commands)} ({shown(self._commands[number])})"

    def _how(self, ended: _Ended, exit_text: Callable[[int], str]) -> str:
        return str(ended.error) if ended.status is None else exit_text(ended.status)

    @staticmethod
    def _told_exit(status: int) -> str:
        return describe_exit(status).partition(":")[0]  # without a hint, which the report has

    def _how_agent_failed(self, status: int) -> str:
        failed = self._failed()
        if failed is None:
            return super()._how_agent_failed(status)
        return f"{self._name(failed.number)} {self._how(failed, self._machine.how_ended)}"

    def _agent_cause(self) -> Cause:
        failed = self._failed()
        if failed is None:
            return super()._agent_cause()
        text = f"{self._name(failed.number)} {self._how(failed, self._machine.how_ended)}"
        if self._machine.is_disk_full():
            text = f"{text}, on {self._machine.full_disk}"
        place = os.path.join(self.log_dir, "before_run", "attempt_0", str(failed.number), "stdout.log")
        return Cause("command", self._node, self._host, None, None, failed.status, text, _last_lines(end_of(place)))


def _last_lines(text: str) -> str:
    """Return the last lines of a command's output, of a progress bar its last state."""
    lines = [line.removesuffix("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines[-_TAIL_LINES:])
