"""Commands of features: their access to a gang, and requests and answers as the datastore keeps them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """A request. It is stored beside the records of the gang's attempt, where the control node looks for it."""

    id: str  # when it was made (UTC), by whom, and something random
    time: float  # when it was made, in seconds since 1970, by the clock of the machine that asks
    feature: str  # which feature answers
    data: dict[str, Any] = field(default_factory=dict)  # the feature's arguments, as plain data


@dataclass(frozen=True)
class Answer:
    """The gang's answer to a request."""

    request: Request
    time: float  # when it was made, in seconds since 1970, by the control node's clock
    data: dict[str, Any] = field(default_factory=dict)  # the feature's answer, as plain data


class GangHasEnded(Exception):
    """The gang has ended, so it can't answer. The message names the command that shows how it ended."""


class Asked(Protocol):
    """One attempt of a gang, for a feature's command."""

    where: str  # run, step and control task
    datastore: Mapping[str, str]  # its type, root and flow

    def kept(self) -> Any:
        """Return the record of the feature's keeper, from JSON; None without a record."""

    def last(self) -> Answer | None:
        """Return the gang's last answer, perhaps to a request of another command; None without any."""

    def ask(self, data: Mapping[str, Any]) -> Answer:
        """Send a request and wait for the answer; raise GangHasEnded, or an error that ends the command."""


@dataclass(frozen=True)
class GangCommand:
    """A feature's command of ``python flow.py torchrun``. It also has arguments for the gang and the attempt."""

    name: str
    help: str
    # name -> type (None for a flag) and help. An option that is not given is None, a flag False.
    options: Mapping[str, tuple[type | None, str]]
    # Gets the options by name; yields lines to print, or raises `TorchrunError`.
    run: Callable[[Asked, Mapping[str, Any]], Iterator[str]]
    is_of_kept: bool = False  # pages of gangs name the command if the feature has recorded data
