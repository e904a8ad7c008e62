"""One node's commands of ``before_run``, in the place of a generation of workers.

They run in a process of ours (`command_runner`), which stands where the agent stands. So a guardian watches and ends
them as it does workers, and the gang hears of them as of a launch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...gang.cause import Cause, describe_exit
from ...node.exits import end_of
from .commands import for_process, shown

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "command_runner.py")
_TAIL_LINES = 30


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or that could not be started; as `command_runner` writes it."""

    number: int  # from 0
    status: int | None
    error: str | None
    seconds: float


@dataclass(frozen=True)
class Ran:
    """A command that has ended on this node, or could not be started, as the control node hears of it."""

    text: str  # which one, and how
    seconds: float
    exit_code: int | None = None  # None: it could not be started


@dataclass(frozen=True)
class Rans:
    """Some commands of a node."""

    commands: tuple[Ran, ...]


class Commands:
    """The program that runs the commands of one node; see `node.plan.Program`."""

    name = "before_run"
    what = "commands"
    agent = "command runner"

    def __init__(self, commands: Sequence[tuple[str, ...]], python: str) -> None:
        self.commands = tuple(commands)
        self._python = python

    def files(self) -> Mapping[str, str]:
        """Return what the runner reads."""
        commands = [{"argv": for_process(words), "shown": shown(words)} for words in self.commands]
        return {"commands.json": json.dumps(commands)}

    def command(self, folder: str) -> list[str]:
        """Return the argv of the runner."""
        # Neither the variables of the commands nor what is installed may change what it does.
        return [self._python, "-I", "-S", SCRIPT, folder]

    def label(self, node: int, number: int) -> str:
        """Return what stands before the lines of a command."""
        return f"[node {node} before_run {number + 1}/{len(self.commands)}] "

    def ended(self, folder: str) -> list[Ended]:
        """Return the commands that have ended."""
        with suppress(OSError), open(os.path.join(folder, "ended.jsonl"), encoding="ascii") as file:
            return [Ended(**json.loads(line)) for line in file if line.endswith("\n")]
        return []

    def ran(self, ended: Ended) -> Ran:
        """Return what is told of a command; without a hint, which the report has."""
        how = self._how(ended, lambda status: describe_exit(status).partition(":")[0])
        return Ran(how, round(ended.seconds, 3), ended.status)

    def cause(self, folder: str, node: int, host: str, how_ended: Callable[[int], str]) -> Cause | None:
        """Return which command has failed, with its last lines; None if none has."""
        failed = next((each for each in self.ended(folder) if each.status != 0), None)
        if failed is None:
            return None
        place = os.path.join(folder, "before_run", "attempt_0", str(failed.number), "stdout.log")
        lines = _last_lines(end_of(place))
        return Cause("command", node, host, None, None, failed.status, self._how(failed, how_ended), lines)

    def _how(self, ended: Ended, exit_text: Callable[[int], str]) -> str:
        name = f"before_run {ended.number + 1}/{len(self.commands)} ({shown(self.commands[ended.number])})"
        return f"{name} {ended.error if ended.status is None else exit_text(ended.status)}"


def _last_lines(text: str) -> str:
    """Return the last lines of a command's output, of a progress bar its last state."""
    lines = [line.removesuffix("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines[-_TAIL_LINES:])
