"""One call of `run` on one node: what was requested, as data, from the task to its supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..gang.policy import LaunchPolicy
from ..launch.spec import LaunchSpec
from ..machine.accelerators import Machine


@dataclass(frozen=True)
class Task:
    """What workers have from the task, as it was when the step's code called `run`."""

    environ: dict[str, str]
    cwd: str
    tmp: str  # the folder for temporary files
    writes: tuple[str, ...] = ()  # the streams that only the task itself can write to: see `task.console.is_elsewhere`


@dataclass(frozen=True)
class Request:
    """One call of `run` on one node, resolved: plain data, from the task to its supervisor."""

    spec: LaunchSpec
    main_addr: str  # of the control node, as this node reaches it
    machine: Machine  # what this node may use
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)  # the control node's counts
    # What must be equal on all nodes besides `spec`, such as the torch version.
    facts: dict[str, Any] = field(default_factory=dict)
    grace_s: float = 30.0  # that workers have between SIGTERM and SIGKILL
    logs: str = "node"  # which lines are shown where: one of `parsing.LOGS`
    nproc_why: str = ""  # why there are so many processes on each node
    warm: str = "off"  # what starts warm: one of `parsing.WARM`
    commands: tuple[tuple[str, ...], ...] = ()  # those of before_run
    task: Task | None = None
    # Of the services that this call asks for; see `task.services.Services`.
    stores: bool = False
    may_train_alone: bool = False
    folders: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()

    @property
    def has_warm_workers(self) -> bool:
        """Whether workers start warm: possible for Python programs that torchrun starts as processes."""
        return self.warm == "workers" and "no-python" not in dict(self.spec.options)

    @property
    def shares_machine(self) -> bool:
        """Whether nodes of this gang share this machine, and so their terminal."""
        return self.machine.nodes_here > 1

    @property
    def shows_failures(self) -> bool:
        """Whether everything that the workers of this node write is shown, including their tracebacks."""
        return not any(map(self.hides, range(self.spec.nproc)))

    def hides(self, local_rank: int) -> bool:
        """Return whether a worker's lines are not shown, unless it fails."""
        spec = self.spec
        if spec.shown_local_ranks is not None and local_rank not in spec.shown_local_ranks:
            return True
        return self.logs == "rank0" and (spec.group_rank, local_rank) != (0, 0)

    def label(self, local_rank: int) -> str:
        """Return the label of a worker's lines in the log."""
        spec = self.spec
        return f"[rank {spec.global_rank(local_rank)}] "

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of the task."""
        return os.environ if self.task is None else self.task.environ

    @property
    def cwd(self) -> str | None:
        """The working directory of the workers; None for this process's."""
        return self.spec.cwd or (None if self.task is None else self.task.cwd)
