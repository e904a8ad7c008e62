"""`TorchrunExecutor`, the object ``current.torch``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

from .compat.datastore import DatastoreValues
from .compat.steps import flow_folder
from .errors import LaunchFailed
from .events import Event
from .machine.accelerators import Machine, Nproc, choose_nproc
from .parsing import parse_folder
from .result import TorchrunResult
from .run_arguments import LEGACY, Runner
from .settings import RunSettings, StepSettings
from .show.gang_part import GangPart
from .supervisor.call import Call
from .task.arguments import Position, resolve
from .task.facts import foreign_python, shm_warning, too_few_warning, with_facts
from .task.function_call import FunctionCall
from .task.launch_call import LaunchCall
from .task.launch_outputs import named_outputs
from .task.make_call import WITHOUT_EFFECT, make_call
from .task.member import Member

_SETTLE_S = 3.0  # for the output of a failed launch, before its error is raised
_warned: set[str] = set()  # lines that this task logs only once


class TorchrunExecutor(Runner):
    """Starts torchrun on every node of the gang and looks after it; offered as ``current.torch``."""

    def __init__(
        self,
        member: Member,
        main_addr: str,
        machine: Machine,
        settings: StepSettings,
        requested: Nproc | None = None,  # what the resources of a remote task amount to
        store: DatastoreValues | None = None,  # for values and outputs; None outside of a flow
        part: Callable[[tuple[str, ...]], GangPart] | None = None,  # returns the gang's parts for the step's own cards
    ) -> None:
        self._member, self._main_addr, self._machine, self._settings = member, main_addr, machine, settings
        self._requested, self._store, self._own_part = requested, store, part

    @property
    def num_nodes(self) -> int:
        """Nodes of the gang."""
        return self._member.num_nodes

    @property
    def node_index(self) -> int:
        """This node, from 0; the same as ``current.parallel.node_index``."""
        return self._member.node

    @property
    def nproc_per_node(self) -> int:
        """Processes per node, unless a call of `run` says otherwise."""
        setting = self._settings.nproc_per_node
        return choose_nproc(setting, "@torchrun(nproc_per_node)", self._requested, self._machine).value

    @property
    def world_size(self) -> int:
        """Processes over all nodes but the spares, unless a call of `run` says otherwise or nodes are lost."""
        return (self.num_nodes - self._settings.spare_nodes) * self.nproc_per_node

    @property
    def main_addr(self) -> str:
        """Address of the control node as this node reaches it."""
        return self._main_addr

    @property
    def is_control(self) -> bool:
        """Whether this is the control node, which hosts rank 0."""
        return self.node_index == 0

    def _part(self, names: tuple[str, ...]) -> GangPart:
        assert self._own_part is not None
        return self._own_part(names)

    def launched(self, given: dict[str, Any]) -> TorchrunResult[Any]:
        """Run a launch to its end."""
        self._member.refuse_in_child()  # before any lock: in a fork, another thread of the task may hold it for ever
        ignored = ", ".join([name for name in LEGACY if given.pop(name, None)])
        if ignored:
            self._note_once(f"warning: run({ignored}) has no effect; name files to store with run(outputs=...) instead")
        place = Position(self.num_nodes, self.node_index, self.main_addr, flow_folder())
        run = resolve(given, self._settings, place)
        outputs = named_outputs(run, self.node_index, self._store)  # first: it holds nothing
        # A gang of one has its values itself.
        function = FunctionCall.of(run, self._store if self.num_nodes > 1 else None)
        with nullcontext() if function is None else closing(function):
            return self._run(run, place, function, outputs)

    def _run(
        self, run: RunSettings, place: Position, function: FunctionCall | None, outputs: tuple[str, ...] | None
    ) -> TorchrunResult[Any]:
        nproc = choose_nproc(run.nproc_per_node, run.nproc_from, self._requested, self._machine)
        stores = bool(outputs) or (function is not None and function.stores)
        program = None if function is None else function.program
        make = partial(make_call, run, place, program, nproc=nproc.value, machine=self._machine, stores=stores)

        def complete() -> Call:
            """Make the call when the commands have ended, which may have made or removed something."""
            importlib.invalidate_caches()
            if run.cwd is not None:
                parse_folder(run.cwd, "After before_run, cwd")
            return with_facts(make())

        call = make(may_come=True) if run.before_run else with_facts(make())
        self._warn(call, run)
        text = f"processes per node: {nproc.value} ({nproc.why})"
        self._member.say(Event("chosen", self.node_index, text, is_detail=True))
        return self._launch(LaunchCall(call, self._member, complete, function, outputs, self._store))

    def _warn(self, call: Call, run: RunSettings) -> None:
        """Log warnings about a launch on this machine."""
        warnings = [shm_warning(call)]
        for name in filter(run.options.__contains__, WITHOUT_EFFECT):
            where = "is in the log of its node, and `python flow.py torchrun logs --rank N` shows it"
            warnings.append(f"warning: torchrun_args {name} has no effect: what a rank writes {where}")
        if self.is_control:
            warnings += [too_few_warning(call)]
            warnings += [foreign_python(words, call.env) for words in (call.command, *call.before_run)]
        for warning in filter(None, warnings):
            self._note_once(warning)

    def _launch(self, call: LaunchCall) -> TorchrunResult[Any]:
        try:
            outcome = call.run()
            self._member.link.settle()  # what the step's code prints next stands behind
            if outcome.verdict.is_without(self.node_index):
                self._member.dismiss(outcome.verdict.launch)
            return call.result(outcome)
        except LaunchFailed as error:
            self._member.link.settle(_SETTLE_S)
            original = call.original(error)
            if original is error:
                raise
            raise original from error

    def _note_once(self, warning: str) -> None:
        if warning not in _warned:
            _warned.add(warning)
            self._member.say(Event("note", self.node_index, warning))
