"""The messages that tell nodes how a launch has ended. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import TorchrunError
from .history import Record, of_the_gang
from .launch import Launch
from .protocol import CONTROL, Verdict


def verdicts(
    launch: Launch,
    nodes: Iterable[int],
    error: TorchrunError | None,
    records: tuple[Record, ...],
    features: Callable[[bool], dict[str, dict[str, Any]]],
) -> Iterator[tuple[int, Verdict]]:
    """Yield what each node gets: one message for all that get the same.

    `features` takes whether the control node is asked for, and returns what each feature tells.
    """
    made: dict[tuple[int, bool], Verdict] = {}
    for node in nodes:
        if node in launch.ready:  # by the number the node itself gave it, which may be the contradiction
            number = launch.ready[node].launch
            key = (number, node == CONTROL)
            if key not in made:
                alone, is_control = error is None and launch.alone, node == CONTROL
                made[key] = Verdict(number, error, events_for(node, records), features(is_control), alone)
            yield node, made[key]


def events_for(node: int, records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Return what a node gets to know of what has happened: the control node all, others what concerns the gang."""
    return records if node == CONTROL else of_the_gang(records)
