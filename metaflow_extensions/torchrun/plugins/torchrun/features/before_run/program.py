"""Starts the commands of ``before_run`` on one node, instead of workers.

Our process `command_runner` runs them instead of an agent. So a guardian watches and stops them like workers, and for
the gang they are a launch.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...gang.cause import Cause, describe_exit
from ...launch.commands import is_by_shell, system_program
from ...logs.pipes import Tail

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "command_runner.py")
_TAIL_LINES = 30
_SHOWN_CHARS = 200


def shown(words: Sequence[str]) -> str:
    """Return a command as one line for the log."""
    text = words[2] if is_by_shell(words) else shlex.join(words)
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"


@dataclass(frozen=True)
class Ended:
    """A command that has ended or could not be started, as written by `command_runner`."""

    number: int  # from 0
    status: int | None
    error: str | None
    seconds: float


class Commands:
    """The program that runs the commands of one node; see `node.plan.Program`."""

    name = "before_run"
    what = "commands"
    agent = "command runner"

    def __init__(self, commands: Sequence[tuple[str, ...]], python: str) -> None:
        self.commands = tuple(commands)
        self.parts = len(self.commands)
        self._python = python

    def files(self) -> Mapping[str, str]:
        """Return the files that the runner reads: name -> contents."""
        commands = []
        for words in self.commands:
            # The shell is found here, because the user's PATH for the commands may lack it.
            program = system_program(words[0]) if is_by_shell(words) else words[0]
            commands.append({"argv": [program, *words[1:]], "shown": shown(words)})
        return {"commands.json": json.dumps(commands)}

    def command(self, folder: str, pipes: str) -> list[str]:
        """Return the argv of the runner."""
        # -I and -S: neither the commands' variables nor installed packages may change what the runner does.
        return [self._python, "-I", "-S", SCRIPT, folder, pipes]

    def label(self, node: int, number: int) -> str:
        """Return the label before the lines of a command."""
        return f"[node {node} before_run {number + 1}/{len(self.commands)}] "

    def ended(self, folder: str) -> list[Ended]:
        """Return the commands that have ended."""
        with suppress(OSError), open(os.path.join(folder, "ended.jsonl"), encoding="ascii") as file:
            return [Ended(**json.loads(line)) for line in file if line.endswith("\n")]
        return []

    def report(self, ended: Ended) -> dict[str, Any]:
        """Return the report on a command for the control node, without hints on signals: the error has them."""
        text = self._how(ended, lambda status: describe_exit(status).partition(":")[0])
        return {"text": text, "exit_code": ended.status, "seconds": round(ended.seconds, 3)}

    def cause(self, folder: str, tail: Tail, node: int, host: str, how_ended: Callable[[int], str]) -> Cause | None:
        """Return the cause with the failed command and its last lines; None if no command has failed."""
        failed = next((each for each in self.ended(folder) if each.status != 0), None)
        if failed is None:
            return None
        lines = _last_lines(tail(failed.number, "stdout"))
        return Cause("command", node, host, None, None, failed.status, self._how(failed, how_ended), lines)

    def _how(self, ended: Ended, exit_text: Callable[[int], str]) -> str:
        name = f"before_run {ended.number + 1}/{len(self.commands)} ({shown(self.commands[ended.number])})"
        return f"{name} {ended.error if ended.status is None else exit_text(ended.status)}"


def _last_lines(text: str) -> str:
    """Return the last lines of a command's output; a progress bar (with CR) is reduced to its last state."""
    lines = [line.removesuffix("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines[-_TAIL_LINES:])
