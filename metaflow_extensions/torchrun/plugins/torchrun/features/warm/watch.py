"""Starts the spares of a node, in its supervisor."""

from __future__ import annotations

from ...gang.wire import Plain
from ...node.watchers import WarmStarts, Watch
from .node import WarmNode


class WarmWatch(Watch):
    """Starts agents from spares; it watches no launch."""

    def spares(self, data: Plain) -> WarmStarts:
        """Start the spare in the background."""
        warm = WarmNode(data["preload"], data["env"], data["workers"])
        warm.prepare()
        return warm


PART = WarmWatch()
