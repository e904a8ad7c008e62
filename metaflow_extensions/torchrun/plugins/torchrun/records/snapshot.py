"""`Snapshot`: everything known about one attempt of a gang, for the datastore and for pages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..gang.history import Record, Report
from ..gang.wire import from_plain, to_plain
from .summary import Summary, summarize

if TYPE_CHECKING:
    from ..gang.gang import Gang

VERSION = 1  # version of the stored form; a later one may add fields
MAX_MESSAGE = 8 * 1024
_MAX_S, _MAX_TIME = 1e9, 1e11  # 30 years, and the year 5138; times after these are damaged ones
# These fields are stored only if they are known; all others always, also null or empty ones.
_WHERE_KNOWN = ("tasks", "command", "now_s", "restarts_left")


@dataclass(frozen=True)
class Snapshot:
    """A gang at one moment."""

    num_nodes: int = 0
    nproc_per_node: int | None = None  # in the last launch
    version: int = VERSION
    cause: dict[str, Any] | None = None  # of the last launch's error, from `Cause.as_dict`
    error: str | None = None  # its message
    facts: dict[str, str] = field(default_factory=dict)  # versions and devices of the control node
    events: tuple[Record, ...] = ()
    reports: tuple[Report, ...] = ()
    tasks: tuple[str, ...] | None = None  # of all nodes in order, each as run, step and task
    command: str | None = None  # of torchrun, on the control node
    now_s: float | None = None  # seconds since the gang's start, while it runs
    restarts_left: int | None = None  # of the last launch
    features: dict[str, Any] = field(default_factory=dict)  # the record of each feature's keeper, as plain data

    @cached_property
    def summary(self) -> Summary:
        """The summary of the gang's records."""
        return summarize(self.events, self.num_nodes, self.nproc_per_node, self.now_s)

    @property
    def began(self) -> float | None:
        """When the gang began, in seconds since 1970."""
        return self.events[0].time - self.events[0].at_s if self.events else None

    def at(self, now_s: float) -> Snapshot:
        """Return the snapshot for a later moment of a running gang."""
        return replace(self, now_s=now_s)

    def stored(self) -> dict[str, Any]:
        """Return the snapshot as it is stored; ``docs/events.md`` lists the fields."""
        plain: dict[str, Any] = to_plain(self)
        features = plain.pop("features")
        known = {name: value for name, value in plain.items() if value is not None or name not in _WHERE_KNOWN}
        return {**known, **features}

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot in the result of `stored`, of any version; raise ValueError if there is none."""
        plain = _known(Snapshot, stored)
        for name, cls in (("events", Record), ("reports", Report)):
            plain[name] = [_known(cls, each) for each in _dicts(stored.get(name), name)]
        # Unknown fields belong to a feature, or to a later version.
        plain["features"] = {name: value for name, value in stored.items() if name not in _FIELDS}
        found: Snapshot = from_plain(Snapshot, plain, "the record of the gang")
        for at_s in [each.at_s for each in found.events] + [each.at_s for each in found.reports]:
            if not 0 <= at_s <= _MAX_S:
                raise ValueError(f"the record of the gang has an event after {at_s:g} s")
        for event in found.events:
            if not 0 <= event.time <= _MAX_TIME:
                raise ValueError(f"the record of the gang has an event at {event.time:g} s since 1970")
        return found


_FIELDS = frozenset(each.name for each in fields(Snapshot)) - {"features"}


def _dicts(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of dicts; null stands for none."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(f"the record of the gang.{name} is {str(value)[:40]!r}, not a list of objects")
    return value


def _known(cls: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that we know; null stands for a field's default."""
    return {each.name: plain[each.name] for each in fields(cls) if plain.get(each.name) is not None}


def snapshot_of(gang: Gang) -> Snapshot:
    """Return all that has happened to a gang until now."""
    error = gang.error
    return Snapshot(
        num_nodes=gang.num_nodes,
        nproc_per_node=gang.nproc,
        restarts_left=gang.restarts_left,
        cause=None if error is None else error.cause,
        error=None if error is None else error.message[:MAX_MESSAGE],
        facts=gang.facts,
        events=gang.history.records,
        reports=gang.history.reports,
        features=gang.keepers.record(),
    )
