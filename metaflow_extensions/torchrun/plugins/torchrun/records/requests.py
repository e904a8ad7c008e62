"""Commands of features: what they read and ask of a gang, and requests and answers as the datastore keeps them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """A question; it lies beside the records of the gang's attempt, and the control node looks for it."""

    id: str  # when it was asked (UTC), by whom, and something random
    time: float  # when, in seconds since 1970, by the clock of the machine that asks
    feature: str  # which feature answers
    data: dict[str, Any] = field(default_factory=dict)  # what it asks, as plain data


@dataclass(frozen=True)
class Answer:
    """What the gang has answered."""

    request: Request
    time: float  # when it was made, in seconds since 1970, by the control node's clock
    data: dict[str, Any] = field(default_factory=dict)  # of the feature, as plain data


class GangHasEnded(Exception):
    """Nobody is left to answer; the message says how to see how the gang has ended."""


class Asked(Protocol):
    """One attempt of a gang, as a feature's command gets it."""

    where: str  # run, step and control task
    datastore: Mapping[str, str]  # its type, root and flow

    def kept(self) -> Any:
        """Return what the feature's keeper has recorded of the gang, from JSON; None without a record."""

    def last(self) -> Answer | None:
        """Return the last answer, which may be to another command."""

    def ask(self, data: Mapping[str, Any]) -> Answer:
        """Ask the feature and wait for the answer; raise GangHasEnded, or an error that ends the command."""


@dataclass(frozen=True)
class GangCommand:
    """A command of ``python flow.py torchrun`` that a feature has; it takes a gang and an attempt, too."""

    name: str
    help: str
    # name -> its type, None for a flag; and its help. An option that is not given is None, a flag False.
    options: Mapping[str, tuple[type | None, str]]
    # Yields lines to print, or raises `TorchrunError`; the options are in the mapping.
    run: Callable[[Asked, Mapping[str, Any]], Iterator[str]]
    is_of_kept: bool = False  # pages of gangs name the command where the feature has recorded something
