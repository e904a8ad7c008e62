"""All settings: the arguments of `run` and the attributes of ``@torchrun``, each in one place.

A setting is a field of `StepSettings`. Its metadata has all that is known of it. The docstrings are made from that, and
what must be written again (`RunOptions` for type checkers, docs/reference.md) is compared with it by tests.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from . import parsing
from .errors import TorchrunConfigError


@dataclass(frozen=True)
class Setting:
    """An argument of `run`, an attribute of ``@torchrun``, or both."""

    of: str  # "run", "step" or "both"
    # Checks and converts the given value; its second argument names the value in errors. Of some, their user checks it.
    check: Callable[[Any, str], Any] = lambda value, name: value
    default: Any = None  # of the attribute, also if it is given as None; of an argument that is no attribute, its own
    none: Any = None  # what the attribute means whose default is None
    kind: str = ""  # the type of what may be given; by default as in `RunOptions`, else that of the field
    help: str = ""
    name: str = ""


def _setting(*about: Any, **more: Any) -> Callable[[str], Any]:
    """Return what makes of a help text the field of a setting."""
    setting = Setting(*about, **more)
    return lambda text: field(default=setting.default, metadata={"": replace(setting, help=text)})


_run, _step, _both = (partial(_setting, of) for of in ("run", "step", "both"))


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The attributes of one step's ``@torchrun``, and the defaults of what only a call of `run` gives."""

    entrypoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Callable[..., Any] | None = _run()(
        """A script: a relative path is searched in `cwd` (or the working directory), then beside the flow file.
        With `module`, the name of a module. Or a command as a list, such as ``["python", "-O", "x.py"]``: every
        rank runs it, as with torchrun's ``--no-python``; its program is searched in the workers' PATH or, if it is
        a path, like a script. Or a function that every rank calls: one of the flow file or of a module, a method, a
        `functools.partial`; with cloudpickle installed also a lambda or a closure."""
    )
    entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = _run()(
        """Arguments of the script or command. In a dict, None or ``""`` makes a bare flag, True and False become
        ``true`` and ``false``, lists and dicts become JSON, all else its `str`. A value that begins with a dash
        shares one word with its option (``--lr=-1``). A list is passed unchanged. For a function: a dict of keyword
        arguments or a list of positional ones, which must be picklable."""
    )
    module: bool = _run(parsing.parse_flag, False)("Run `entrypoint` as ``python -m``.")
    process_group: Any = _run(parsing.parse_process_group)(
        """For a function: make this process group before the call, and destroy it after. The rank's own device is
        set. ``"auto"`` is nccl where each rank has a CUDA device, else gloo. By default none is made."""
    )
    nproc_per_node: int | str | None = _both(parsing.parse_nproc)(
        """Processes on each node, or ``"auto"``, ``"cpu"`` or ``"gpu"``. By default the GPUs that ``@kubernetes``,
        ``@batch`` and ``@resources`` request, or those visible on this machine, or 1."""
    )
    warm: str = _both(parsing.parse_warm, "agent", kind="str | bool")(
        """What becomes of spares, which are processes of each node that import torch while the step's own code runs
        before `run`: ``"agent"``, torchrun alone, which no script can tell; ``"workers"``, the workers, too, so
        that they begin with torch imported; False, nothing."""
    )
    preload: tuple[str, ...] = _step(parsing.parse_modules, none=(), kind="str | Sequence[str] | None")(
        "Further modules that spare workers import beforehand."
    )
    env: Mapping[str, str] | None = _both(parsing.parse_env)(
        """Environment variables for the workers and for `before_run`. That of a call replaces the attribute as a
        whole."""
    )
    cwd: str | None = _both(parsing.parse_path)(
        "Working directory of the workers and of `before_run`. By default the task's own."
    )
    before_run: tuple[tuple[str, ...], ...] | None = _both(parsing.parse_commands)(
        """Commands that run one after another, once on each node, before the workers of each launch start. A list
        is run unchanged, a string by ``sh -ec``. If one fails on any node, nothing is launched. Restarts do not
        repeat them."""
    )
    timeout_s: float | None = _both(parsing.parse_seconds)(
        """Seconds that a launch may take once all nodes are ready; each restart counts anew. None sets no limit.
        The step's ``@timeout`` always limits all launches together."""
    )
    max_restarts: int = _both(parsing.parse_whole, 0)(
        "How often all workers are started again on all nodes after one of them failed, in one launch."
    )
    restart_on: frozenset[str] = _both(parsing.parse_restart_on, none=parsing.DEFAULT_RESTART_ON)(
        """Which classes of causes restart them: ``"user"``, an error of the script; ``"killed"``, a signal or lack
        of memory; ``"timeout"``, a launch over its time; ``"hang"``; ``"start"``, an agent that could not start;
        ``"network"``, nodes that can't reach each other; ``"node_lost"`` and ``"preempted"``, nodes that are gone.
        By default all but ``"start"`` and ``"network"``."""
    )
    spare_nodes: int = _step(parsing.parse_whole, 0)(
        """How many nodes, the last ones of ``num_parallel``, wait in the first launch until another node is lost.
        One that took no part then leaves."""
    )
    min_nodes: int | None = _step(partial(parsing.parse_whole, least=1))(
        """With how many nodes a launch goes on at least after the loss of others, when no other task takes their
        place. By default with all that are no spares. Not on Argo Workflows."""
    )
    hang_timeout_s: float | None = _both(parsing.parse_seconds)(
        """Seconds without any output or exit of any rank after which a launch counts as hanging: the stacks of all
        workers go to the logs and to files, and the launch fails. None, the default, does not watch: silence is no
        proof of a hang (evaluation, compilation or data preparation can be silent for an hour), and a stop loses
        work. torch itself ends a collective that hangs: NCCL after 10 minutes, gloo after 30, unless a script sets
        another timeout."""
    )
    preemption_signal: int = _both(parsing.parse_signal, "SIGTERM")(
        """What the workers get, once, when a node is told to stop or its machine is taken away. They have
        ``grace_s`` seconds to save."""
    )
    # Attributes alone: the gang counts with them between launches, too.
    grace_s: float = _step(partial(parsing.parse_seconds, zero=True), 30)(
        "Seconds that workers have between SIGTERM and SIGKILL."
    )
    all_nodes_started_timeout: float = _step(parsing.parse_seconds, 600)(
        "Seconds to wait until all nodes have started."
    )
    heartbeat_timeout_s: float = _step(parsing.parse_seconds, 30)(
        "Seconds of silence after which a node counts as lost."
    )
    gather: bool = _run(parsing.parse_flag, False)(
        """For a function: send the values of all ranks to the control node's result, through Metaflow's datastore."""
    )
    outputs: Any = _run(parsing.parse_outputs)(
        """Files, folders and patterns (``*``, ``**``) relative to `cwd`, as in ``["model/", "*.json"]``. They are
        stored in Metaflow's datastore when all workers have ended; the result's `outputs` has them. After a
        failure, existing files are stored, and the error's `outputs` has them. By default none."""
    )
    outputs_from: str | None = _run(parsing.parse_outputs_from)(
        "Whose outputs are stored: the control node's or every node's. By default the control node's."
    )
    logs: str | None = _step(parsing.parse_logs)(
        """Whose lines the control node's log has, which is what the terminal shows: ``"all"``, those of all nodes;
        ``"node"``, its own; ``"rank0"``, rank 0's alone and, when a rank fails, its last 100. Each node's own log
        has its own in any case, except for ``"rank0"``. By default ``"all"`` up to 16 nodes, and ``"node"`` above."""
    )
    torchrun_args: Any = _run()(
        """Further options of torchrun, as in ``{"monitor_interval": 1}`` or ``["--monitor-interval=1"]``. Those
        that are arguments here, too, come before the attributes."""
    )
    master_port: int | None = _both(parsing.parse_port)(
        "Port of torch's rendezvous on the control node. By default the kernel chooses a free one."
    )
    channel_port: int | None = _step(parsing.parse_port, kind="int | str | None")(
        "Port on the control node through which the nodes agree. By default the kernel chooses."
    )

    @property
    def replaces_nodes(self) -> bool:
        """Whether another task may take the place of a lost node, where the backend brings one."""
        return self.max_restarts > 0 and bool(self.restart_on & {"node_lost", "preempted"})

    def logs_of(self, num_nodes: int) -> str:
        """Return whose lines are shown: by default all of a small gang. Who starts two nodes wants to see both."""
        return self.logs or ("all" if num_nodes <= _ALL_UP_TO_NODES else "node")


_ALL_UP_TO_NODES = 16


@dataclass(frozen=True, kw_only=True)
class RunSettings(StepSettings):
    """The settings of one call of `run` on one node, merged and checked; those of the step that no call changes stay."""

    command: tuple[str, ...]  # the words, where the entrypoint is a command
    nproc_from: str  # where `nproc_per_node` was written
    options: Mapping[str, str | None]  # torchrun's further ones, with hyphens; None marks a flag


class RunOptions(TypedDict, total=False):
    """The arguments of `run` that are given by name, for type checkers."""

    module: bool
    process_group: Literal["gloo", "nccl", "auto"] | None
    nproc_per_node: int | str | None
    warm: Literal["agent", "workers", False] | None
    env: Mapping[str, Any] | None
    cwd: Path | str | None
    before_run: Sequence[str | Sequence[Path | str]] | None
    timeout_s: float | None
    max_restarts: int | None
    restart_on: str | Iterable[str] | None
    hang_timeout_s: float | None
    preemption_signal: str | int | None
    gather: bool
    outputs: Path | str | Sequence[Path | str] | None
    outputs_from: Literal["control", "all"] | None
    torchrun_args: Mapping[str, Any] | Sequence[Any] | None
    master_port: int | str | None


_TYPES = {name: hint.__forward_arg__ for name, hint in RunOptions.__annotations__.items()}
SETTINGS: dict[str, Setting] = {
    each.name: replace(
        each.metadata[""], name=each.name, kind=each.metadata[""].kind or _TYPES.get(each.name, str(each.type))
    )
    for each in fields(StepSettings)
}
# The attributes, and the arguments, with their defaults. An argument that is an attribute as well has none of its own.
DEFAULTS = {each.name: each.default for each in SETTINGS.values() if each.of != "run"}
ARGUMENTS = {each.name: each.default if each.of == "run" else None for each in SETTINGS.values() if each.of != "step"}


def with_parameters(doc: str | None, defaults: Mapping[str, Any]) -> str | None:
    """Return a docstring with the section "Parameters" before its first other section, as numpydoc has it."""
    if doc is None:  # as it is with `python -OO`
        return None
    lines = ["Parameters", "----------"]
    for name, default in defaults.items():
        setting, optional = SETTINGS[name], ", optional" if default is None else ""
        kind = setting.kind.removesuffix(" | None")
        lines.append(f"{name} : {kind}{optional}, default {default!r}".replace("'", '"'))
        lines += [f"    {line}" for line in inspect.cleandoc(setting.help).splitlines()]
    text, rule, sections = inspect.cleandoc(doc).partition("\n---")
    before, _, first = text.rpartition("\n")
    return "\n".join([before, *lines, "", f"{first}{rule}{sections}"])


def parse_settings(attributes: Mapping[str, Any], step: str) -> StepSettings:
    """Return the checked attributes of a step, or raise TorchrunConfigError."""
    values = {}
    for name in DEFAULTS:
        given, setting = attributes.get(name), SETTINGS[name]
        # `--with torchrun:key=value` sends strings.
        given = None if isinstance(given, str) and given.strip().lower() in ("", "none") else given
        given = setting.default if given is None else given
        values[name] = setting.none if given is None else setting.check(given, f"Step {step}: @torchrun({name}=...)")
    return StepSettings(**values)


def check_spares(settings: StepSettings, num_nodes: int, step: str) -> None:
    """Raise TorchrunConfigError for spare or fewer nodes that a gang of so many nodes can't have, or can't use."""
    spares, least = settings.spare_nodes, settings.min_nodes
    left, given = num_nodes - spares, f"spare_nodes={spares}" if spares else f"min_nodes={least}"
    if num_nodes < 1:
        raise TorchrunConfigError(f"Step {step}: num_parallel is {num_nodes}. A gang has at least one node: raise it.")
    if not spares and least is None:
        return
    if not settings.max_restarts:
        why = "needs max_restarts: after the loss of a node all workers start again. Add max_restarts=3, or another number"
    elif not settings.replaces_nodes:
        why = "is of no use, since restart_on has neither 'node_lost' nor 'preempted'. Add one of them, or remove it"
    elif left < 1:
        why = (
            f"leaves no node to train, since num_parallel is {num_nodes}. Raise num_parallel: it counts the spares, too"
        )
    elif least is not None and least > left:
        given, nodes = f"min_nodes={least}", f"num_parallel={num_nodes}, spare_nodes={spares}"
        why = f"is more than the {left} nodes that train ({nodes}). Lower min_nodes, or raise num_parallel"
    else:
        return
    raise TorchrunConfigError(f"Step {step}: @torchrun({given}) {why}.")


def refuse_unknown(names: Sequence[str], step: str) -> None:
    """Raise TorchrunConfigError for attributes that ``@torchrun`` does not have."""
    for name in names:
        hint = f"{parsing.did_you_mean(name, list(DEFAULTS))} It has {', '.join(DEFAULTS)}."
        raise TorchrunConfigError(f"Step {step}: @torchrun has no attribute {name}.{hint}")
