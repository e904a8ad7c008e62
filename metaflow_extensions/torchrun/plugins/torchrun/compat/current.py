"""Copies Metaflow's `current` of this task into data for the workers of a function.

`features/functions/function_worker` makes a worker's own `current` return the same. Read in
``metaflow/metaflow_current.py`` of 2.13 and 2.19.39.
"""

from __future__ import annotations

import pickle
from typing import Any

from .renamed import known

current: Any = known("metaflow:current")  # a supervisor, which imports this, too, runs without Metaflow
_PARALLEL = known("metaflow.metaflow_current:Parallel")
# Reading these sends requests to Metaflow's metadata service. A worker's `current` makes them itself.
_MADE_WHEN_ASKED = frozenset({"run", "task"})
_PLAIN = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset)


def current_for_workers() -> bytes:
    """Return a pickle of `current`: its ``state``, its ``values``, and the names that are ``withheld``.

    The state is its private fields. The values are properties of its class, added by decorators of Metaflow and of
    extensions (2.13 to 2.19). Those that are not plain data, such as the task's cards, are withheld.
    """
    values: dict[str, Any] = {}
    withheld = []
    for name, thing in vars(type(current)).items():
        if not isinstance(thing, property) or name in _MADE_WHEN_ASKED:
            continue
        try:
            value = getattr(current, name)
        except Exception:  # noqa: S112 - `graph` without a flow (2.19) raises; so does a worker's `current`
            continue
        if is_plain(value):
            values[name] = value
        else:
            withheld.append(name)
    state = {name: value for name, value in vars(current).items() if name.startswith("_") and is_plain(value)}
    return pickle.dumps({"state": state, "values": values, "withheld": withheld}, pickle.HIGHEST_PROTOCOL)


def is_plain(thing: Any) -> bool:
    """Return whether `thing` is plain data, nested or not, without methods that have effects."""
    kind = type(thing)
    if kind is dict:
        return all(is_plain(part) for pair in thing.items() for part in pair)
    if kind in _CONTAINERS or kind is _PARALLEL:
        return all(map(is_plain, thing))
    return kind in _PLAIN
