"""The nodes that take part in one generation, and which nodes follow when some are lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The nodes of a generation, in the order of their group ranks: the first `size` ones that are not in `without`.

    It is said in this way since it goes to thousands of nodes, of which few are missing.
    """

    size: int
    without: tuple[int, ...] = ()  # in order; all others below the last node of the group take part

    @property
    def nodes(self) -> tuple[int, ...]:
        """The indexes of the nodes, in the order of their group ranks."""
        without = set(self.without)
        return tuple(node for node in range(self.size + len(without)) if node not in without)

    def rank_of(self, node: int) -> int | None:
        """Return a node's group rank; None if it takes no part."""
        rank = node - sum(each < node for each in self.without)
        return rank if node not in self.without and rank < self.size else None


def follow(group: Group, able: Sequence[int], size: int, least: int) -> Group | None:
    """Return the group of the next generation; None if fewer than `least` nodes are left.

    `able` are all nodes that can take part, in order. Those of `group` stay; of the others the first ones fill it up to
    `size`.
    """
    before = set(group.nodes)
    stay = [node for node in able if node in before]
    come = [node for node in able if node not in before][: max(0, size - len(stay))]
    nodes = {*stay, *come}
    without = tuple(node for node in range(max(nodes, default=0)) if node not in nodes)
    return Group(len(nodes), without) if len(nodes) >= least else None
