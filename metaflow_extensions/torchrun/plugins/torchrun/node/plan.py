"""One launch on one node: what was requested, and what its supervisor adds to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..logs.pipes import Write
from .request import Request
from .watchers import WarmStarts, Watch


@dataclass(frozen=True)
class Plan(Request):
    """A request, with what runs it."""

    write: Write = lambda stream, lines: True  # writes the workers' output
    warm_node: WarmStarts | None = None  # what starts it warm, if a feature can
    watches: Mapping[str, Watch] = field(default_factory=dict)  # of all features, by name

    @classmethod
    def of(cls, request: Request, **more: Any) -> Plan:
        """Return the plan of a request."""
        return cls(**{each.name: getattr(request, each.name) for each in fields(request)}, **more)

    def prepare_warm(self) -> None:
        """Prepare a spare for the next agent of this step: of a restart, or of the next launch."""
        if self.warm_node is not None and self.warm != "off":
            self.warm_node.prepare()
