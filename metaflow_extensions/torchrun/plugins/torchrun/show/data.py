"""Plain data of a gang, for ``torchrun show --json``; ``docs/seeing.md`` lists the fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..gang.wire import finite
from ..records.snapshot import Snapshot
from ..records.summary import Node
from .page import Place


def as_data(place: Place, snapshot: Snapshot | None, kept: Iterable[str] = ()) -> dict[str, Any]:
    """Return the data; `kept` are the names of features, whose data are null if there are none."""
    known = snapshot or Snapshot()
    summary, stored = known.summary, known.stored()
    nodes = {node.index: node for node in summary.nodes}
    data = {
        "run": place.run,
        "clone": None if place.clone is None else {"run": place.clone[0], "control_task": place.clone[1]},
        "control_task": place.control_task,
        "attempt": place.attempt,
        "last_attempt": place.last_attempt,
        "outcome": None if snapshot is None else place.outcome(summary),
        "sentence": None if snapshot is None else summary.sentence,
        "began": known.began,
        "seconds": None if snapshot is None else round(summary.seconds, 3),
        "restarts": len(summary.restarts_s),
        **{name: stored.get(name) for name in ("nproc_per_node", "restarts_left", "facts", "command")},
        "nodes": [_node(place, known, number, nodes.get(number)) for number in sorted({*place.tasks, *nodes})],
        **{name: stored.get(name) for name in ("reports", "events")},
        **dict.fromkeys(kept),
        **{name: kept for name, kept in known.features.items() if kept is not None},
    }
    plain: dict[str, Any] = finite(data)
    return plain


def _node(place: Place, snapshot: Snapshot, number: int, node: Node | None) -> dict[str, Any]:
    ranks = snapshot.summary.by_node.get(number, [])
    return {
        "node": number,
        "host": None if node is None else node.host or None,
        "task": place.tasks.get(number),
        "ranks": [rank.rank for rank in ranks],
        "state": None if node is None else node.word,
        "seconds": None if node is None else node.seconds,
        "exit_codes": {str(rank.rank): rank.exit_code for rank in ranks},
    }
