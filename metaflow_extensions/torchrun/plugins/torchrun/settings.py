"""The attributes of ``@torchrun``, checked and converted.

``--with torchrun:nproc_per_node=2`` sends strings, so every value may be one.
"""

from __future__ import annotations

import difflib
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .devices import parse_nproc
from .errors import TorchrunConfigError
from .launch_spec import parse_port
from .policy import DEFAULT_RETRY_ON, parse_restarts, parse_retry_on, parse_signal

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
    """Return the attributes as settings.

    Raises
    ------
    TorchrunConfigError
        If one is wrong; the message names the step and the attribute.
    """

    def name(key: str) -> str:
        return f"Step {step}: @torchrun({key}=...)"

    def value(key: str) -> Any:
        given = attributes.get(key, DEFAULTS[key])
        return None if isinstance(given, str) and given.strip().lower() in ("", "none") else given

    retry_on = parse_retry_on(value("retry_on"), name("retry_on"))
    settings = StepSettings(
        nproc_per_node=parse_nproc(value("nproc_per_node"), name("nproc_per_node")),
        all_nodes_started_timeout=_seconds(value("all_nodes_started_timeout"), name("all_nodes_started_timeout")),
        master_port=parse_port(value("master_port"), name("master_port")),
        channel_port=parse_port(value("channel_port"), name("channel_port")),
        heartbeat_timeout_s=_seconds(value("heartbeat_timeout_s"), name("heartbeat_timeout_s")),
        grace_s=_seconds(value("grace_s"), name("grace_s"), zero=True),
        max_restarts=parse_restarts(value("max_restarts"), name("max_restarts")) or 0,
        retry_on=DEFAULT_RETRY_ON if retry_on is None else retry_on,
        preemption_signal=parse_signal(value("preemption_signal"), name("preemption_signal")) or signal.SIGTERM,
        hang_timeout_s=parse_seconds(value("hang_timeout_s"), name("hang_timeout_s")),
        preflight=_switch(value("preflight"), name("preflight")),
    )
    if settings.master_port is not None and settings.master_port == settings.channel_port:
        raise TorchrunConfigError(
            f"{name('master_port')} and channel_port are both {settings.master_port}; the rendezvous and the channel each "
            "need a port of their own."
        )
    return settings


def refuse_unknown(names: Sequence[str], step: str) -> None:
    """Raise for attributes that ``@torchrun`` does not have.

    Raises
    ------
    TorchrunConfigError
        If there is any; the message names the step and the nearest attribute.
    """
    for name in names:
        near = difflib.get_close_matches(name, DEFAULTS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TorchrunConfigError(
            f"Step {step}: @torchrun has no attribute {name}.{hint} It has {', '.join(DEFAULTS)}."
        )


def parse_seconds(value: Any, setting: str) -> float | None:
    """Return a time limit in seconds; None stays None (no limit).

    Raises
    ------
    TorchrunConfigError
        If it is no positive number.
    """
    return None if value is None else _seconds(value, setting)


def _switch(value: Any, setting: str) -> bool:
    """Return True or False; both may be text or a number, as `--with` sends them."""
    word = "false" if value is None else str(value).strip().lower()
    if word not in ("true", "1", "false", "0"):
        raise TorchrunConfigError(f"{setting} is {value!r}, but it must be True or False.")
    return word in ("true", "1")


def _seconds(value: Any, setting: str, zero: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise TorchrunConfigError(f"{setting} is {value!r}, but it must be a number of seconds above 0.")
    return number
