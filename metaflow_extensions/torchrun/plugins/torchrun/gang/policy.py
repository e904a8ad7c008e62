"""Rules: of a gang, of a launch (restarts, preemptions), and which nodes take part in a generation. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..parsing import DEFAULT_RESTART_ON
from .limits import STOP_MARGIN_S


@dataclass(frozen=True)
class Rules:
    """The settings of a gang that hold for all its launches."""

    started_timeout_s: float = 600.0  # ``all_nodes_started_timeout``
    grace_s: float = 30.0  # time of the workers between SIGTERM and SIGKILL
    name: str = "gang"  # unique: two gangs that pin the same port must not share one torch store
    deadline: float = float("inf")  # end of the step's ``@timeout`` on the gang's clock
    longer: str = "longer than the step's @timeout allows"  # says so; "it ran " stands before it
    # Of all nodes, so many wait until one is lost; and with how many a launch goes on, by default with all others.
    spare_nodes: int = 0
    min_nodes: int | None = None
    replaces: bool = False  # whether another task comes in the place of one that is gone, as on Kubernetes
    stacks: str = ""  # the command that shows what the ranks do; empty where there is none, as outside of a flow
    # Returns a shell command that shows why a node is missing, or "".
    why_it_waits: Callable[[int], str] = lambda node: ""

    @property
    def stop_s(self) -> float:
        """How long the nodes may take to stop their workers."""
        return self.grace_s + STOP_MARGIN_S


@dataclass(frozen=True)
class LaunchPolicy:
    """Limits and restarts of one launch; the control node's values count for all nodes."""

    # How long one generation may run, from *go* to its end. As Metaflow's ``@timeout`` counts for each attempt, so
    # does this for each restart.
    timeout_s: float | None = None
    max_restarts: int = 0  # how often the gang may be restarted
    restart_on: frozenset[str] = DEFAULT_RESTART_ON  # the classes of causes that restart it
    preemption_signal: int = signal.SIGTERM  # what workers get when a node is preempted
    hang_timeout_s: float | None = None  # how long all ranks may be silent


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
