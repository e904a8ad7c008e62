"""Compares what programs have seen, key by key: everything is the same, but for what a table allows, with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Seen = Mapping[str, Any]


def anything(cold: Any, warm: Any) -> bool:
    """Take any difference."""
    return True


@dataclass(frozen=True)
class Allowed:
    """A difference that may be: it must then be there, too, or the table tells of what is no more."""

    keys: str  # a pattern
    why: str
    fits: Callable[[Any, Any], bool] = anything  # what the two are to each other

    def names(self, key: str) -> bool:
        return re.fullmatch(self.keys, key) is not None


def differences(pairs: Iterable[tuple[Seen, Seen]], allowed: Sequence[Allowed] = ()) -> list[str]:
    """Return what is not the same in pairs of cold and warm, and what was allowed and is the same in all of them."""
    found, used = [], set()
    for cold, warm in pairs:
        assert cold, "nothing was seen"
        for key in sorted({*cold, *warm}):
            if (key in cold) == (key in warm) and cold.get(key) == warm.get(key):
                continue
            entries = [entry for entry in allowed if entry.names(key) and key in cold and key in warm]
            if any(entry.fits(cold[key], warm[key]) for entry in entries):
                used.update(entries)
            else:
                found.append(_told(key, cold.get(key, "(absent)"), warm.get(key, "(absent)")))
    unused = [f"allowed, but the same: {entry.keys} ({entry.why})" for entry in allowed if entry not in used]
    return list(dict.fromkeys(found)) + unused


def _told(key: str, cold: Any, warm: Any) -> str:
    if isinstance(cold, list) and isinstance(warm, list):
        gone, new = [each for each in cold if each not in warm], [each for each in warm if each not in cold]
        if gone or new:
            return f"{key}: lost {gone}, new {new}"
    return f"{key}: cold {cold!r}, warm {warm!r}"


def shared(drawn: Sequence[Seen], cold: Sequence[Seen], allowed: Sequence[str] = ()) -> list[str]:
    """Return what of these random values two have in common, where no two of the cold ones have.

    What all cold ones have in common, all others must have, too. Who is `allowed` to share it, and does not, is told.
    """
    found = []
    for key in sorted({key for each in (*drawn, *cold) for key in each}):
        values, reference = ([str(each[key]) for each in seen if key in each] for seen in (drawn, cold))
        assert len(values) == len(reference) > 1, f"{key} is not drawn everywhere"
        if len(set(reference)) == 1:
            wrong = set(values) != set(reference)
        else:
            assert len(set(reference)) == len(reference), f"{key} is drawn twice in cold processes"
            wrong = len({*values, *reference}) < len(values) + len(reference)
        if wrong != (key in allowed):
            found.append(f"{key}: cold {reference}, others {values}")
    return found
