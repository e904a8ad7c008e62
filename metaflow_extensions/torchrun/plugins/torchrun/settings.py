"""Every setting in one table: the arguments of `run` and the attributes of ``@torchrun``; and whose value counts.

What they mean stands in the docstrings of `TorchrunExecutor.run` and `TorchrunDecorator`, and the arguments' types in
`run_arguments.RunOptions`. Tests compare those, and the pages, with the table.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import parsing
from .errors import TorchrunConfigError

_REFUSED = object()
FOR_0_2 = "0.2"  # the group of what is taken from flows of metaflow-torchrun 0.2, and ignored


class Setting(NamedTuple):
    """An argument of `run`, an attribute of ``@torchrun``, or both."""

    name: str
    of: str  # "run", "step" or "both"
    group: str = "reference"  # the page of docs/ that tells of it
    # Makes the value of what is given, which the second argument names. None: who needs the value checks it.
    check: Callable[[Any, str], Any] | None = None
    default: Any = None  # of the attribute; of an argument that is none, its own
    none: Any = None  # what the attribute means that is given as None


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("entrypoint", "run"),
        Setting("entrypoint_args", "run"),
        Setting("nproc_per_node", "both", check=parsing.parse_nproc),
        Setting("torchrun_args", "run"),
        Setting("module", "run", check=parsing.parse_flag, default=False),
        Setting("env", "run", check=parsing.parse_env),
        Setting("cwd", "run", check=parsing.parse_folder),
        Setting("before_run", "run", "before-run"),
        Setting("timeout_s", "run", check=parsing.parse_seconds),
        Setting("all_nodes_started_timeout", "step", "reference", parsing.parse_seconds, 600, _REFUSED),
        Setting("master_port", "both", check=parsing.parse_port),
        Setting("channel_port", "step", check=parsing.parse_port),
        Setting("heartbeat_timeout_s", "step", "reference", parsing.parse_seconds, 30, _REFUSED),
        Setting("grace_s", "step", "reference", parsing.parse_seconds_or_0, 30, _REFUSED),
        Setting("max_restarts", "both", "restarts", parsing.parse_restarts, 0, 0),
        Setting("restart_on", "both", "restarts", parsing.parse_restart_on, None, parsing.DEFAULT_RESTART_ON),
        Setting("hang_timeout_s", "both", "hangs", parsing.parse_seconds),
        Setting("preemption_signal", "both", "preemption", parsing.parse_signal, "SIGTERM", int(signal.SIGTERM)),
        Setting("preflight", "step", "preflight", parsing.parse_preflight, False, False),
        Setting("logs", "step", check=parsing.parse_logs),
        Setting("warm", "both", "warm", parsing.parse_warm, "agent", "agent"),
        Setting("preload", "step", "warm", parsing.parse_modules, None, ()),
        Setting("process_group", "run", "functions"),
        Setting("gather", "run", "functions", parsing.parse_flag, False),
        Setting("outputs", "run", "outputs", parsing.parse_outputs),
        Setting("outputs_from", "run", "outputs", parsing.parse_outputs_from),
        Setting("push_results_dir_to_cloud", "run", FOR_0_2),
        Setting("local_output_dir", "run", FOR_0_2),
        Setting("cloud_output_dir", "run", FOR_0_2),
    )
}
# The attributes, and the arguments, with their defaults. An argument that is an attribute as well has none of its own.
DEFAULTS = {each.name: each.default for each in SETTINGS.values() if each.of != "run"}
ARGUMENTS = {each.name: each.default if each.of == "run" else None for each in SETTINGS.values() if each.of != "step"}
# Up to so many nodes one log has the lines of all: who starts two from a terminal wants to see both.
_ALL_UP_TO_NODES = 16


def argument(name: str, given: Mapping[str, Any]) -> Any:
    """Return an argument of `run` that is no attribute as its value; None where it is not given."""
    value = given.get(name)
    return None if value is None else checked_value(name, value, f"run({name})")


def checked_value(name: str, value: Any, source: str) -> Any:
    """Return what is given for a setting as its value, or raise TorchrunConfigError; `source` is what to call it."""
    check = SETTINGS[name].check
    return value if check is None else check(value, source)


@dataclass(frozen=True)
class StepSettings:
    """The attributes of one step's ``@torchrun``; see `decorator.TorchrunDecorator` for their meaning."""

    nproc_per_node: int | str | None
    all_nodes_started_timeout: float
    master_port: int | None
    channel_port: int | None
    heartbeat_timeout_s: float
    grace_s: float
    max_restarts: int
    restart_on: frozenset[str]
    preemption_signal: int
    hang_timeout_s: float | None
    preflight: bool
    logs: str | None
    warm: str
    preload: tuple[str, ...]

    def logs_of(self, num_nodes: int) -> str:
        """Return whose lines are shown, out of `parsing.LOGS`: of a small gang all, unless somebody says otherwise."""
        return self.logs or ("all" if num_nodes <= _ALL_UP_TO_NODES else "node")


def parse_settings(attributes: Mapping[str, Any], step: str | None) -> StepSettings:
    """Return the attributes as settings, or raise TorchrunConfigError; without a step, a call of `run` gives them."""

    def name(key: str) -> str:
        return f"run({key})" if step is None else f"Step {step}: @torchrun({key}=...)"

    def parsed(key: str) -> Any:
        given = attributes.get(key, DEFAULTS[key])
        # `--with torchrun:key=value` sends strings.
        given = None if isinstance(given, str) and given.strip().lower() in ("", "none") else given
        none = SETTINGS[key].none
        return none if given is None and none is not _REFUSED else checked_value(key, given, name(key))

    settings = StepSettings(**{key: parsed(key) for key in DEFAULTS})
    if settings.master_port is not None and settings.master_port == settings.channel_port:
        raise TorchrunConfigError(
            f"{name('master_port')} and channel_port are both {settings.master_port}; the rendezvous and the channel each "
            "need a port of their own."
        )
    return settings


class Choice(NamedTuple):
    """The value of a setting that counts, None if nobody gives one, and what to call its source."""

    value: Any
    source: str


def choose(
    setting: str, arguments: Mapping[str, Any], options: Mapping[str, str | None], settings: StepSettings
) -> Choice:
    """Return the value that counts: the call's comes first, then that of ``torchrun_args``, then the attribute's."""
    option = setting.replace("_", "-")
    given = {f"run({setting})": arguments.get(setting), f"torchrun_args {option}": options.get(option)}
    parsed = [
        Choice(checked_value(setting, value, source), source) for source, value in given.items() if value is not None
    ]
    choices = [choice for choice in parsed if choice.value is not None]
    if len({choice.value for choice in choices}) > 1:
        raise TorchrunConfigError(
            f"run({setting}={choices[0].value!r}) and torchrun_args {option}={choices[1].value!r} disagree; keep one of them."
        )
    return choices[0] if choices else Choice(getattr(settings, setting, None), f"@torchrun({setting})")


def refuse_unknown(names: Sequence[str], step: str) -> None:
    """Raise TorchrunConfigError for attributes that ``@torchrun`` does not have."""
    for name in names:
        hint = parsing.did_you_mean(name, list(DEFAULTS))
        raise TorchrunConfigError(
            f"Step {step}: @torchrun has no attribute {name}.{hint} It has {', '.join(DEFAULTS)}."
        )
