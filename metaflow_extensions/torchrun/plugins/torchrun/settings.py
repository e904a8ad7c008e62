"""The table of all settings: the arguments of `run` and the attributes of ``@torchrun``.

The docstrings of `TorchrunExecutor.run` and `TorchrunDecorator` explain them; `run_arguments.RunOptions` has the types.
Tests compare both, and the pages, with the table.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import parsing
from .errors import TorchrunConfigError

_REFUSED = object()
# The groups of settings; docs/reference.md has a table of the arguments of each, in this order.
WHAT, PROCESSES, ENVIRONMENT = "what to run", "processes", "environment"
FAILURES, RESULTS, EXPERT = "failures", "results", "expert"
GROUPS = (WHAT, PROCESSES, ENVIRONMENT, FAILURES, RESULTS, EXPERT)


class Setting(NamedTuple):
    """An argument of `run`, an attribute of ``@torchrun``, or both."""

    name: str
    of: str  # "run", "step" or "both"
    group: str  # one of `GROUPS`
    page: str = "reference"  # the page of docs/ that explains it
    # Checks and converts the given value; its second argument names the value in errors. None: its user checks it.
    check: Callable[[Any, str], Any] | None = None
    default: Any = None  # of the attribute; of an argument that is no attribute, its own
    none: Any = None  # what the attribute means that is given as None
    # Replaces `check` for the attribute: the machine that submits a flow may lack what a node has.
    check_attribute: Callable[[Any, str], Any] | None = None


# An attribute is the default of its step. An argument of `run` overrides the attribute of its name.
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("entrypoint", "run", WHAT),
        Setting("entrypoint_args", "run", WHAT),
        Setting("module", "run", WHAT, check=parsing.parse_flag, default=False),
        Setting("process_group", "run", WHAT, "functions"),
        Setting("nproc_per_node", "both", PROCESSES, check=parsing.parse_nproc),
        Setting("warm", "both", PROCESSES, "warm", parsing.parse_warm, "agent", "agent"),
        Setting("preload", "step", PROCESSES, "warm", parsing.parse_modules, None, ()),
        Setting("env", "both", ENVIRONMENT, check=parsing.parse_env),
        Setting("cwd", "both", ENVIRONMENT, check=parsing.parse_folder, check_attribute=parsing.parse_path),
        Setting("before_run", "both", ENVIRONMENT, "before-run", parsing.parse_commands),
        Setting("timeout_s", "both", FAILURES, check=parsing.parse_seconds),
        Setting("max_restarts", "both", FAILURES, "restarts", parsing.parse_restarts, 0, 0),
        Setting("restart_on", "both", FAILURES, "restarts", parsing.parse_restart_on, None, parsing.DEFAULT_RESTART_ON),
        Setting("spare_nodes", "step", FAILURES, "lost-nodes", parsing.parse_restarts, 0, 0),
        Setting("min_nodes", "step", FAILURES, "lost-nodes", parsing.parse_least),
        Setting("hang_timeout_s", "both", FAILURES, "hangs", parsing.parse_seconds),
        Setting(
            "preemption_signal", "both", FAILURES, "preemption", parsing.parse_signal, "SIGTERM", int(signal.SIGTERM)
        ),
        # Attributes alone: the gang counts with them between launches, too.
        Setting("grace_s", "step", FAILURES, "reference", parsing.parse_seconds_or_0, 30, _REFUSED),
        Setting("all_nodes_started_timeout", "step", FAILURES, "reference", parsing.parse_seconds, 600, _REFUSED),
        Setting("heartbeat_timeout_s", "step", FAILURES, "reference", parsing.parse_seconds, 30, _REFUSED),
        Setting("gather", "run", RESULTS, "functions", parsing.parse_flag, False),
        Setting("outputs", "run", RESULTS, "outputs", parsing.parse_outputs),
        Setting("outputs_from", "run", RESULTS, "outputs", parsing.parse_outputs_from),
        Setting("logs", "step", RESULTS, check=parsing.parse_logs),
        Setting("torchrun_args", "run", EXPERT),
        Setting("master_port", "both", EXPERT, check=parsing.parse_port),
        Setting("channel_port", "step", EXPERT, check=parsing.parse_port),
    )
}
# The attributes, and the arguments, with their defaults. An argument that is an attribute as well has none of its own.
DEFAULTS = {each.name: each.default for each in SETTINGS.values() if each.of != "run"}
ARGUMENTS = {each.name: each.default if each.of == "run" else None for each in SETTINGS.values() if each.of != "step"}
# Up to this many nodes, one log shows the lines of all: a user who starts two nodes wants to see both.
_ALL_UP_TO_NODES = 16


def checked_value(name: str, value: Any, source: str) -> Any:
    """Return the checked value of a setting, or raise TorchrunConfigError, which calls the value `source`."""
    check = SETTINGS[name].check
    return value if check is None else check(value, source)


@dataclass(frozen=True)
class StepSettings:
    """The attributes of one step's ``@torchrun``; see `decorator.TorchrunDecorator` for their meaning."""

    nproc_per_node: int | str | None
    env: Mapping[str, str] | None
    cwd: str | None  # may be missing on this node
    before_run: tuple[tuple[str, ...], ...] | None
    timeout_s: float | None
    all_nodes_started_timeout: float
    master_port: int | None
    channel_port: int | None
    heartbeat_timeout_s: float
    grace_s: float
    max_restarts: int
    restart_on: frozenset[str]
    spare_nodes: int
    min_nodes: int | None
    preemption_signal: int
    hang_timeout_s: float | None
    logs: str | None
    warm: str
    preload: tuple[str, ...]

    @property
    def replaces_nodes(self) -> bool:
        """Whether another task may take the place of a lost node, where the backend brings one."""
        return self.max_restarts > 0 and bool(self.restart_on & {"node_lost", "preempted"})

    def logs_of(self, num_nodes: int) -> str:
        """Return whose lines are shown, one of `parsing.LOGS`: by default all of a small gang."""
        return self.logs or ("all" if num_nodes <= _ALL_UP_TO_NODES else "node")


def parse_settings(attributes: Mapping[str, Any], step: str | None) -> StepSettings:
    """Return the checked attributes, or raise TorchrunConfigError. `step` is None where a call of `run` gives them."""

    def name(key: str) -> str:
        return f"run({key})" if step is None else f"Step {step}: @torchrun({key}=...)"

    def parsed(key: str) -> Any:
        given = attributes.get(key, DEFAULTS[key])
        # `--with torchrun:key=value` sends strings.
        given = None if isinstance(given, str) and given.strip().lower() in ("", "none") else given
        none = SETTINGS[key].none
        if given is None and none is not _REFUSED:
            return none
        check = SETTINGS[key].check_attribute
        return checked_value(key, given, name(key)) if check is None else check(given, name(key))

    settings = StepSettings(**{key: parsed(key) for key in DEFAULTS})
    if settings.master_port is not None and settings.master_port == settings.channel_port:
        raise TorchrunConfigError(
            f"{name('master_port')} and channel_port are both {settings.master_port}; the rendezvous and the channel each "
            "need a port of their own."
        )
    return settings


def check_spares(settings: StepSettings, num_nodes: int, step: str) -> None:
    """Raise TorchrunConfigError for spare or fewer nodes that a gang of so many nodes can't have, or can't use."""
    spares, least = settings.spare_nodes, settings.min_nodes
    if (spares or least is not None) and not settings.max_restarts:
        given = f"spare_nodes={spares}" if spares else f"min_nodes={least}"
        raise TorchrunConfigError(
            f"Step {step}: @torchrun({given}) needs max_restarts: after the loss of a node all workers start again. "
            "Add max_restarts=3, or another number."
        )
    if (spares or least is not None) and not settings.restart_on & {"node_lost", "preempted"}:
        given = f"spare_nodes={spares}" if spares else f"min_nodes={least}"
        raise TorchrunConfigError(
            f"Step {step}: @torchrun({given}) is of no use, since restart_on has neither 'node_lost' nor 'preempted'. Add "
            f"one of them, or remove {given.partition('=')[0]}."
        )
    if num_nodes < 1:
        raise TorchrunConfigError(f"Step {step}: num_parallel is {num_nodes}. A gang has at least one node: raise it.")
    if spares >= num_nodes:
        raise TorchrunConfigError(
            f"Step {step}: @torchrun(spare_nodes={spares}) leaves no node to train, since num_parallel is {num_nodes}. "
            "Raise num_parallel: it counts the spares, too."
        )
    if least is not None and least > num_nodes - spares:
        raise TorchrunConfigError(
            f"Step {step}: @torchrun(min_nodes={least}) is more than the {num_nodes - spares} nodes that train "
            f"(num_parallel={num_nodes}, spare_nodes={spares}). Lower min_nodes, or raise num_parallel."
        )


def refuse_unknown(names: Sequence[str], step: str) -> None:
    """Raise TorchrunConfigError for attributes that ``@torchrun`` does not have."""
    for name in names:
        hint = f"{parsing.did_you_mean(name, list(DEFAULTS))} It has {', '.join(DEFAULTS)}."
        raise TorchrunConfigError(f"Step {step}: @torchrun has no attribute {name}.{hint}")
