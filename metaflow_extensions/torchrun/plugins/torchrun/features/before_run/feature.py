"""What runs before the workers, once on each node: ``run(before_run=...)``.

The gang runs it as a launch of its own. So all nodes begin together, all stop when a command fails on one, and no
worker starts before the last command has ended.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ...gang.keepers import Happened, Keeper, Plain, Remarks
from ...gang.protocol import Told
from ...gang.texts import counted
from ...gang.wire import from_plain, to_plain
from ...launch.commands import beside_flow, foreign_python
from ...launch.spec import LaunchSpec
from ...node.preludes import Asked, Prelude, own_launch
from ...node.watchers import Feature, Here, Watcher
from ...result import TorchrunResult
from .program import SCRIPT, Commands, Ran, Rans, before_commands


class BeforeRun(Feature):
    """Commands of the user's before the workers."""

    name = "before_run"
    together = MappingProxyType({"command": "{nodes}: {text}, {took}"})

    def prelude(self, asked: Asked) -> Prelude | None:
        """Return the launch of the commands, where some are asked for."""
        commands = before_commands(asked.arguments.get("before_run"))
        return None if commands is None else CommandsFirst(commands, asked)

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper:
        """Return what makes records of commands that have ended."""
        return CommandRecords()

    def watcher(self, here: Here) -> Watcher:
        """Return what sees commands end, where some run."""
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
        """Return the launch that runs the commands, in the folder and with the variables of `of_run`."""
        spec = own_launch(of_run, SCRIPT)
        flow_dir = self._asked.flow_dir
        found = tuple((beside_flow(words[0], spec.cwd, flow_dir), *words[1:]) for words in self._commands)
        self.program = Commands(found, spec.python)
        for words in self._commands if self._asked.is_control else ():
            if (warning := foreign_python(words, dict(spec.env))) is not None:
                self._asked.say_once(warning)
        return spec

    def ended(self, result: TorchrunResult[Any]) -> None:
        """Say how long it took."""
        if self._asked.is_control:
            on = counted(self._asked.num_nodes, "node")
            self._asked.say(f"before_run: {counted(len(self._commands), 'command')} on {on}, {result.duration_s:.1f} s")


class CommandWatcher(Watcher):
    """Tells which commands have ended on this node."""

    def __init__(self, program: Commands, folder: str) -> None:
        self._program, self._folder = program, folder
        self._told = 0

    def poll(self) -> Plain | None:
        """Return those that have ended since the last time."""
        ended = self._program.ended(self._folder)
        new, self._told = ended[self._told :], len(ended)
        told: Plain | None = to_plain(Rans(tuple(map(self._program.ran, new)))) if new else None
        return told

    def ended(self) -> Plain | None:
        """Return the last ones."""
        return self.poll()


class CommandRecords(Keeper):
    """Makes a record of each command that has ended, and keeps nothing."""

    has_record = False

    def handle(self, node: int, told: Told, at_s: float) -> Remarks:
        """Return the records of a node's commands."""
        return Remarks(happened=tuple(_record(node, ran) for ran in from_plain(Rans, told.data, "before_run").commands))


def _record(node: int, ran: Ran) -> Happened:
    return Happened("command", node, ran.text, exit_code=ran.exit_code, seconds=ran.seconds)
