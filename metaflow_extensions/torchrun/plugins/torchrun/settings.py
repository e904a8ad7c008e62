"""The attributes of ``@torchrun``, checked and converted, and the one rule for whose value of a setting counts."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .errors import TorchrunConfigError
from .parsing import (
    DEFAULT_RETRY_ON,
    parse_nproc,
    parse_port,
    parse_required_seconds,
    parse_restarts,
    parse_retry_on,
    parse_seconds,
    parse_signal,
    parse_switch,
)

DEFAULTS: dict[str, Any] = {
    "nproc_per_node": None,
    "all_nodes_started_timeout": 600,
    "master_port": None,
    "channel_port": None,
    "heartbeat_timeout_s": 30,
    "grace_s": 30,
    "max_restarts": 0,
    "retry_on": None,
    "preemption_signal": "SIGTERM",
    "hang_timeout_s": None,
    "preflight": False,
}
# How a setting is read, wherever it is given; `timeout_s` is of `run` alone.
_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "nproc_per_node": parse_nproc,
    "all_nodes_started_timeout": parse_required_seconds,
    "master_port": parse_port,
    "channel_port": parse_port,
    "heartbeat_timeout_s": parse_required_seconds,
    "grace_s": partial(parse_required_seconds, zero=True),
    "max_restarts": parse_restarts,
    "retry_on": parse_retry_on,
    "preemption_signal": parse_signal,
    "hang_timeout_s": parse_seconds,
    "preflight": parse_switch,
    "timeout_s": parse_seconds,
}
# What an attribute means that is given as None.
_WITHOUT_VALUE = {"max_restarts": 0, "retry_on": DEFAULT_RETRY_ON, "preemption_signal": int(signal.SIGTERM)}


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
    retry_on: frozenset[str]
    preemption_signal: int
    hang_timeout_s: float | None
    preflight: bool


def parse_settings(attributes: Mapping[str, Any], step: str) -> StepSettings:
    """Return the attributes as settings, or raise TorchrunConfigError."""

    def name(key: str) -> str:
        return f"Step {step}: @torchrun({key}=...)"

    def parsed(key: str) -> Any:
        given = attributes.get(key, DEFAULTS[key])
        # `--with torchrun:key=value` sends strings.
        given = None if isinstance(given, str) and given.strip().lower() in ("", "none") else given
        value = _PARSERS[key](given, name(key))
        return _WITHOUT_VALUE.get(key) if value is None else value

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
    parse, option = _PARSERS[setting], setting.replace("_", "-")
    argument = parse(arguments.get(setting), f"run({setting})")
    from_options = parse(options.get(option), f"torchrun_args {option}")
    if argument is not None and from_options is not None and argument != from_options:
        raise TorchrunConfigError(
            f"run({setting}={argument!r}) and torchrun_args {option}={from_options!r} disagree; keep one of them."
        )
    if argument is not None:
        return Choice(argument, f"run({setting})")
    if from_options is not None:
        return Choice(from_options, f"torchrun_args {option}")
    return Choice(getattr(settings, setting, None), f"@torchrun({setting})")


def refuse_unknown(names: Sequence[str], step: str) -> None:
    """Raise TorchrunConfigError for attributes that ``@torchrun`` does not have."""
    for name in names:
        near = difflib.get_close_matches(name, DEFAULTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TorchrunConfigError(
            f"Step {step}: @torchrun has no attribute {name}.{hint} It has {', '.join(DEFAULTS)}."
        )
