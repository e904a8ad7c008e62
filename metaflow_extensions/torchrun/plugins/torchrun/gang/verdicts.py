"""The messages that tell nodes how a launch has ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    features: Mapping[str, dict[str, Any]],
) -> Iterator[tuple[int, Verdict]]:
    """Yield what each node gets: one message for all that get the same."""
    made: dict[tuple[int, bool], Verdict] = {}
    for node in nodes:
        if node in launch.ready:  # by the number the node itself gave it, which may be the contradiction
            number = launch.ready[node].launch
            key = (number, node == CONTROL)
            if key not in made:
                alone = error is None and launch.alone
                stored, outputs = launch.stored_for(node, error), launch.outputs_for(node)
                events = events_for(node, records)
                made[key] = Verdict(number, error, stored, events, dict(features), alone, outputs)
            yield node, made[key]


def events_for(node: int, records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Return what a node gets to know of what has happened: the control node all, others what concerns the gang."""
    return records if node == CONTROL else of_the_gang(records)
