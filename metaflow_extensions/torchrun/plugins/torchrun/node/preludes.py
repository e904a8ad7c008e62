"""Launches that come before the user's own in the same call of `run`: what a feature says of one."""

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
    """A call of `run`, as a feature sees it that may launch something before."""

    arguments: Mapping[str, Any]  # of `run`, by name
    settings: StepSettings
    flow_dir: str | None  # the folder of the flow file, if there is one
    num_nodes: int
    is_control: bool  # whether this is the control node, whose log says what concerns all
    has_been: bool  # whether this feature's launch has ended well in this step before
    say: Callable[[str], None]  # takes a line for the log
    say_once: Callable[[str], None]  # takes one that a task says once


class Prelude:
    """One launch before the user's own. Nothing restarts it, and where it fails nothing else is launched."""

    program: Program | None = None  # what it runs in the place of torchrun and its workers
    # Whether it may make the entrypoint and install software: both are looked at after it then.
    prepares = False
    installs = False  # whether a process that has imported something before may not be what a new one is
    failed = ""  # what its failure means, for the error

    def spec(self, of_run: LaunchSpec) -> LaunchSpec | None:
        """Return what is launched before `of_run`; None if nothing needs to be."""
        return None

    def ended(self, result: TorchrunResult[Any]) -> None:
        """Take note that it has ended well on all nodes."""


def own_launch(of_run: LaunchSpec, script: str) -> LaunchSpec:
    """Return the launch of a script of ours: it has nodes, processes, port, folder and variables of `of_run`."""
    own = replace(of_run, entrypoint=script, args=(), module=False, options=(), command=(), source=None, function=None)
    # All nodes take part and rank by their index, whatever torchrun's own elasticity is to do later.
    return replace(own, shown_local_ranks=None, max_restarts=0, min_nodes=None)
