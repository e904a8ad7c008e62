"""`Call`: one call of `run` on one node, checked and complete, and its `Outcome`: plain data between task and supervisor."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

from ..gang.messages import Verdict
from ..gang.policy import Group, LaunchPolicy
from ..machine.accelerators import Machine


@dataclass(frozen=True)
class FunctionSpec:
    """The function that workers call instead of a script."""

    name: str
    values: str = ""  # the folder for what its ranks return or raise; emptied before each generation
    gathers: bool = False  # a function that gathers values needs no process group: its ranks may train alone


@dataclass(frozen=True)
class Call:
    """One call of `run` on one node."""

    entrypoint: str  # absolute path of the script, or the name of the module or (with no-python) the executable
    args: tuple[str, ...]  # what the script sees as sys.argv[1:]
    module: bool  # run as python -m
    nproc: int  # processes per node
    num_nodes: int
    node_index: int
    python: str
    options: dict[str, str | None] = field(default_factory=dict)  # torchrun's further ones; None marks a flag
    master_port: int | None = None  # None: the control node chooses
    env: dict[str, str] = field(default_factory=dict)  # what the user sets for this launch
    function: FunctionSpec | None = None  # what the entrypoint calls, where that is ours
    source: str | None = None  # the file that must be the same on all nodes; None means the entrypoint
    bools: tuple[tuple[str, bool], ...] = ()  # of `args`, those that were given as True or False, by their names
    command: tuple[str, ...] = ()  # the words of a command as entrypoint, as they were given
    module_folder: str | None = None  # where the workers find the module, unless Python finds it without that
    group: Group | None = None  # the nodes that take part; None: all
    main_addr: str = "127.0.0.1"  # of the control node, as this node reaches it
    machine: Machine = field(default_factory=lambda: Machine(1))  # what this node may use
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)  # the control node's counts
    facts: dict[str, Any] = field(default_factory=dict)  # what else must be equal on all nodes, as the torch version
    grace_s: float = 30.0  # that workers have between SIGTERM and SIGKILL
    logs: str = "node"  # which lines are shown where: see `settings`
    warm: str = "off"  # what starts warm: see `settings`
    before_run: tuple[tuple[str, ...], ...] = ()
    # What the workers have from the task, as it is when the step's code calls `run`.
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=os.getcwd)  # absolute
    tmp: str = field(default_factory=lambda: os.path.abspath(tempfile.gettempdir()))
    writes: tuple[str, ...] = ()  # the streams that only the task itself can write to: see `task.console.is_elsewhere`
    stores: bool = False  # whether the task may have something to store when all workers have ended

    # --- its ranks

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return self.nproc * self.group_size

    @property
    def group_size(self) -> int:
        """Number of nodes that take part."""
        return self.num_nodes if self.group is None else self.group.size

    @property
    def group_rank(self) -> int | None:
        """This node's rank among them; None if it takes no part."""
        return self.node_index if self.group is None else self.group.rank_of(self.node_index)

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a worker of this node."""
        assert self.group_rank is not None, f"node {self.node_index} takes no part"
        return self.group_rank * self.nproc + local_rank

    @property
    def ranks(self) -> range:
        """The global ranks of this node, in the order of the local ones."""
        return range(0) if self.group_rank is None else range(self.global_rank(0), self.global_rank(self.nproc))

    # --- what follows from it

    def digest(self) -> str:
        """Return a fingerprint of what must be the same on every node."""
        options = [(name, value) for name, value in self.options.items() if name != "rdzv-id"]
        name = os.path.basename(self.entrypoint) if self.function is None else self.function.name
        words = [os.path.basename(word) for word in self.command]
        return hashlib.sha256(json.dumps([name, self.module, options, words]).encode()).hexdigest()[:16]

    @property
    def is_python(self) -> bool:
        """Whether the workers are Python programs."""
        return "no-python" not in self.options

    @property
    def has_warm_workers(self) -> bool:
        """Whether workers start warm: possible for Python programs that torchrun starts as processes."""
        return self.warm == "workers" and self.is_python

    @property
    def shares_machine(self) -> bool:
        """Whether nodes of this gang share this machine, and so their terminal."""
        return self.machine.nodes_here > 1

    @property
    def shows_failures(self) -> bool:
        """Whether everything that the workers of this node write is shown, including their tracebacks."""
        return not any(map(self.hides, range(self.nproc)))

    def hides(self, local_rank: int) -> bool:
        """Return whether a worker's lines are not shown, unless it fails."""
        return self.logs == "rank0" and (self.group_rank, local_rank) != (0, 0)


@dataclass(frozen=True)
class Outcome:
    """How a launch has ended on this node."""

    verdict: Verdict
    command: str  # of the last generation, quoted for a shell
    exit_codes: dict[int, int]  # of its workers, by global rank
    restarts: tuple[dict[str, Any], ...]
    duration_s: float
