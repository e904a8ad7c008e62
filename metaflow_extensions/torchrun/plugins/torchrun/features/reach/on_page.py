"""How the page tells of nodes that can't reach torch's store."""

from __future__ import annotations

from types import MappingProxyType

from ...records.on_page import OnPage
from .told import KIND


class ReachOnPage(OnPage):
    """One line for all such nodes."""

    together = MappingProxyType({KIND: "{nodes} {text}"})


PART = ReachOnPage()
