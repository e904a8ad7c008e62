"""Preludes: launches of a feature before the user's own, in the same call of `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..launch.spec import LaunchSpec
from ..result import TorchrunResult
from ..settings import StepSettings
from .plan import Program


@dataclass(frozen=True)
class Asked:
    """A call of `run`, as a feature sees it that may add a prelude."""

    arguments: Mapping[str, Any]  # of `run`, by name
    settings: StepSettings
    flow_dir: str | None  # the folder of the flow file, if there is one
    num_nodes: int
    is_control: bool  # whether this is the control node, which logs what concerns all nodes
    has_been: bool  # whether this feature's launch has ended well in this step before
    say: Callable[[str], None]  # writes a line to the log
    say_once: Callable[[str], None]  # writes a line to the log, once in a task


class Prelude:
    """One launch before the user's own. It is never restarted; if it fails, the user's launch does not begin."""

    program: Program | None = None  # what it runs instead of torchrun and its workers
    # Whether it may create the entrypoint or install software: then both are checked only after it.
    prepares = False
    installs = False  # whether a spare may have imported what the prelude has changed since
    failed = ""  # what its failure means, as text for the error

    def spec(self, of_run: LaunchSpec) -> LaunchSpec | None:
        """Return what is launched before `of_run`; None if nothing needs to be."""
        return None

    def ended(self, result: TorchrunResult[Any]) -> None:
        """Handle its good end on all nodes."""


def own_launch(of_run: LaunchSpec, script: str) -> LaunchSpec:
    """Return the launch of a script of ours: it has nodes, processes, port, folder and variables of `of_run`."""
    own = replace(of_run, entrypoint=script, args=(), module=False, options=(), command=(), source=None, function=None)
    # All nodes take part and rank by their index, whatever torchrun's own elasticity is to do later.
    return replace(own, shown_local_ranks=None, max_restarts=0, min_nodes=None)
