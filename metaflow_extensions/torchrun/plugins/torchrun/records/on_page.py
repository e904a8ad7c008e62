"""A feature's part on the gang's page, and among the commands. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from ..elements.model import Part
from .requests import GangCommand
from .summary import Summary


class OnPage:
    """What a gang's page shows of a feature."""

    after = ""  # the section of the page that comes before its own; empty where it has none
    # How records of its kinds are told on the page of several ranks or nodes at once: with {ranks}, {nodes}, {text}, {took}.
    together: Mapping[str, str] = MappingProxyType({})
    command: GangCommand | None = None  # its command of ``python flow.py torchrun``

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return its section of the gang's page, also years later: `kept` is its keeper's record, or None without one.

        An older version may have made `kept`. What this raises stands in the section's place.
        """
        return ()

    def marks(self, kept: Any, summary: Summary) -> Mapping[int, str]:
        """Return what is odd about ranks, in some words for the cell of each."""
        return {}


Pages: TypeAlias = Mapping[str, OnPage]
"""The parts of several features, by the features' names."""
NO_PAGES: Pages = MappingProxyType({})
