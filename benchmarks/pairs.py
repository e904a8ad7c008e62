"""Variants of the same work, measured in turns, and what one is to another within a round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_turns(
    variants: Mapping[str, Callable[[], T]], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[T]]:
    """Run each variant once in each round, and return what each has returned, round by round.

    Every second round runs backwards. So no variant always comes first or has always the same before it, and a machine
    that grows slower by and by is as slow for one as for another.
    """
    taken: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            tell(f"round {number + 1} of {rounds}: {name}")
            taken[name].append(variants[name]())
    return taken


def ratios(values: Sequence[float], against: Sequence[float]) -> list[float]:
    """Return for each round how many times as much a variant took as another did in that round."""
    return [value / other for value, other in zip(values, against, strict=True)]


def differences(values: Sequence[float], *against: Sequence[float]) -> list[float]:
    """Return for each round how much more a variant took than the others in that round took together."""
    return [value - sum(others) for value, *others in zip(values, *against, strict=True)]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what each round has taken, by name."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def in_folder(run: Callable[[Path], T]) -> T:
    """Return what it returns, given a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder))
