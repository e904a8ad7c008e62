"""The feature ``run(before_run=...)``: commands that run once on each node before the workers.

The gang runs them in a separate launch. So all nodes start together, and all stop when a command fails on one. No
worker starts before the last command has ended on every node.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ...gang.keepers import Happened, Keeper, Plain, Remarks
from ...gang.protocol import Told
from ...gang.texts import counted
from ...launch.commands import beside_flow, foreign_python
from ...launch.spec import LaunchSpec
from ...node.preludes import Asked, Prelude, own_launch
from ...node.watchers import Feature, Here, Watcher
from ...result import TorchrunResult
from ...settings import argument
from .program import SCRIPT, Commands


class BeforeRun(Feature):
    """The user's commands that run before the workers."""

    name = "before_run"
    together = MappingProxyType({"command": "{nodes}: {text}, {took}"})

    def prelude(self, asked: Asked) -> Prelude | None:
        """Return the launch of the commands; None if `run` got none."""
        commands = argument("before_run", asked.arguments)
        return None if commands is None else CommandsFirst(commands, asked)

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper:
        """Return the keeper that records ended commands."""
        return CommandRecords()

    def watcher(self, here: Here) -> Watcher:
        """Return the watcher that reports ended commands, if this launch runs commands."""
        program = here.plan.program
        return CommandWatcher(program, here.folder) if isinstance(program, Commands) else Watcher()


class CommandsFirst(Prelude):
    """The launch of the commands."""

    prepares = True
    failed = "before_run failed, so no worker was started on any node."

    def __init__(self, commands: tuple[tuple[str, ...], ...], asked: Asked) -> None:
        self._commands, self._asked = commands, asked
        self.installs = bool(commands)

    def spec(self, of_run: LaunchSpec) -> LaunchSpec:
        """Return the launch of the commands, with the folder and the variables of `of_run`."""
        spec = own_launch(of_run, SCRIPT)
        flow_dir = self._asked.flow_dir
        found = tuple((beside_flow(words[0], spec.cwd, flow_dir), *words[1:]) for words in self._commands)
        self.program = Commands(found, spec.python)
        for words in self._commands if self._asked.is_control else ():
            if (warning := foreign_python(words, dict(spec.env))) is not None:
                self._asked.say_once(warning)
        return spec

    def ended(self, result: TorchrunResult[Any]) -> None:
        """Log how long the commands took."""
        if self._asked.is_control:
            on = counted(self._asked.num_nodes, "node")
            self._asked.say(f"before_run: {counted(len(self._commands), 'command')} on {on}, {result.duration_s:.1f} s")


class CommandWatcher(Watcher):
    """Reports the ended commands of this node."""

    def __init__(self, program: Commands, folder: str) -> None:
        self._program, self._folder = program, folder
        self._told = 0

    def poll(self) -> Plain | None:
        """Return the commands that have ended since the last poll."""
        ended = self._program.ended(self._folder)
        new, self._told = ended[self._told :], len(ended)
        return {"commands": [self._program.report(each) for each in new]} if new else None

    def ended(self) -> Plain | None:
        """Return the last ended commands."""
        return self.poll()


class CommandRecords(Keeper):
    """Adds a record for each ended command, and keeps no data."""

    has_record = False

    def handle(self, node: int, told: Told, at_s: float) -> Remarks:
        """Return the records of a node's commands."""
        return Remarks(happened=tuple(Happened("command", node, **each) for each in told.data["commands"]))
