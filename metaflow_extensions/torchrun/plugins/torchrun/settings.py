"""The attributes of ``@torchrun``, checked and converted, and the one rule for whose value of a setting counts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from . import parsing
from .errors import TorchrunConfigError

# Attribute -> its default, and how its value is read, wherever it is given.
_ATTRIBUTES: dict[str, tuple[Any, Callable[[Any, str], Any]]] = {
    "nproc_per_node": (None, parsing.parse_nproc),
    "all_nodes_started_timeout": (600, parsing.parse_seconds),
    "master_port": (None, parsing.parse_port),
    "channel_port": (None, parsing.parse_port),
    "heartbeat_timeout_s": (30, parsing.parse_seconds),
    "grace_s": (30, partial(parsing.parse_seconds, zero=True)),
    "max_restarts": (0, parsing.parse_restarts),
    "retry_on": (None, parsing.parse_retry_on),
    "preemption_signal": ("SIGTERM", parsing.parse_signal),
    "hang_timeout_s": (None, parsing.parse_seconds),
    "preflight": (False, parsing.parse_preflight),
    "logs": (None, parsing.parse_logs),
    "warm": ("agent", parsing.parse_warm),
    "preload": (None, parsing.parse_modules),
}
DEFAULTS = {name: default for name, (default, _) in _ATTRIBUTES.items()}
_PARSERS = {name: parse for name, (_, parse) in _ATTRIBUTES.items()} | {"timeout_s": parsing.parse_seconds}
# What an attribute means that is given as None; the others must have a value.
_WITHOUT_VALUE = {
    **dict.fromkeys(("nproc_per_node", "master_port", "channel_port", "hang_timeout_s", "logs")),
    "max_restarts": 0,
    "retry_on": parsing.DEFAULT_RETRY_ON,
    "preemption_signal": int(signal.SIGTERM),
    "preflight": "off",
    "warm": "agent",
    "preload": (),
}


# Up to so many nodes one log has the lines of all: who starts two from a terminal wants to see both.
_ALL_UP_TO_NODES = 16


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
    preflight: str
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
        return _WITHOUT_VALUE[key] if given is None and key in _WITHOUT_VALUE else _PARSERS[key](given, name(key))

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
    parsed = [Choice(_PARSERS[setting](value, source), source) for source, value in given.items() if value is not None]
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
