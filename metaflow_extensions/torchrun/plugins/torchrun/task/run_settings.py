"""`RunSettings`: what one call of `run` asks for, with ``torchrun_args`` and the step's attributes merged in.

What comes after it asks none of the three sources for an argument of `run`. Of files it looks for `cwd` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import TorchrunConfigError
from ..parsing import parse_argv
from ..settings import ARGUMENTS, SETTINGS, StepSettings, checked_value
from .arguments import Position, options_of, refuse_variables

# Settings that torchrun has as options, too.
_OPTIONS = ("nproc_per_node", "max_restarts", "master_port")
# Options that the gang decides or does itself; torchrun gets its own value of them, or none.
_DECIDED = frozenset({"nproc-per-node", "master-port", "max-restarts", "redirects", "tee"})


class Choice(NamedTuple):
    """The effective value of a setting (None if it is not set), and the name of its source."""

    value: Any
    source: str


@dataclass(frozen=True)
class RunSettings:
    """The settings of one call of `run` on one node, merged and checked; see `executor.TorchrunExecutor.run`."""

    entrypoint: Any  # not checked: the name of a script, module or program, or a function
    command: tuple[str, ...]  # the words, where the entrypoint is a command
    entrypoint_args: Any  # not checked: a script gets words, a function its own arguments
    module: bool
    process_group: str | None
    nproc_per_node: Choice  # a number, "auto", "cpu", "gpu" or None
    warm: str
    env: Mapping[str, str]
    cwd: str | None  # absolute
    before_run: tuple[tuple[str, ...], ...]
    timeout_s: float | None
    max_restarts: int
    restart_on: frozenset[str]
    hang_timeout_s: float | None
    preemption_signal: int
    gather: bool
    outputs: tuple[str, ...] | None
    outputs_from: str | None
    master_port: int | None
    options: Mapping[str, str | None]  # torchrun's further ones, with hyphens; None marks a flag


def resolve(arguments: Mapping[str, Any], settings: StepSettings, place: Position) -> RunSettings:
    """Merge and check the arguments of `run`, by name; raises TorchrunConfigError.

    The value of the call counts, else that of ``torchrun_args``, else the attribute, else the default.
    """
    options = options_of(arguments.get("torchrun_args"), place)
    chosen = {name: _choose(name, arguments, options, settings) for name in ARGUMENTS if name != "torchrun_args"}
    values = {name: choice.value for name, choice in chosen.items()}
    values["module"] = values["module"] or "module" in options
    values["env"] = values["env"] or {}
    refuse_variables(values["env"])
    return RunSettings(
        **values
        | {
            "command": _command(values["entrypoint"], values["module"]),
            "before_run": values["before_run"] or (),
            "nproc_per_node": chosen["nproc_per_node"],
            "options": {name: value for name, value in options.items() if name not in {*_DECIDED, "module"}},
        }
    )


def _choose(
    name: str, arguments: Mapping[str, Any], options: Mapping[str, str | None], settings: StepSettings
) -> Choice:
    option = name.replace("_", "-")
    given = {f"run({name})": arguments.get(name)}
    if name in _OPTIONS:
        given[f"torchrun_args {option}"] = options.get(option)
    parsed = [
        Choice(checked_value(name, value, source), source) for source, value in given.items() if value is not None
    ]
    choices = [choice for choice in parsed if choice.value is not None]
    if len(choices) > 1 and choices[0].value != choices[1].value:
        raise TorchrunConfigError(
            f"run({name}={choices[0].value!r}) and torchrun_args {option}={choices[1].value!r} disagree; keep one of them."
        )
    return choices[0] if choices else _default(name, settings)


def _default(name: str, settings: StepSettings) -> Choice:
    if SETTINGS[name].of == "run":
        return Choice(ARGUMENTS[name], "the default")
    value, source = getattr(settings, name), f"@torchrun({name})"
    if value is not None and SETTINGS[name].check_attribute is not None:  # what depends on the node is checked here
        value = checked_value(name, value, source)
    return Choice(value, source)


def _command(entrypoint: Any, module: bool) -> tuple[str, ...]:
    if not isinstance(entrypoint, list | tuple):
        return ()
    words = parse_argv(entrypoint, "the entrypoint")
    if module:
        raise TorchrunConfigError(
            f"module says how Python runs a script, but the entrypoint {list(words)} is a command; remove it."
        )
    return words
