"""What one node does in one launch, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..gang.cause import Cause
from ..gang.policy import LaunchPolicy
from ..gang.protocol import WORKERS
from ..launch.spec import LaunchSpec
from ..launch.transfer import ValueStore
from ..logs.follower import Write
from ..machine.accelerators import Machine
from .agent import Warm
from .services import Services


class WarmStarts(Protocol):
    """Starts the agents of one node faster than cold; belongs to the step's thread."""

    def to_start(
        self, cold_command: list[str], command: list[str], workers: int, worker_env: Mapping[str, str]
    ) -> Warm:
        """Return how to start one agent: by `command` where so many of its workers start faster, too, with `worker_env`."""

    def prepare(self) -> None:
        """Make ready for another agent, in the background; raises nothing."""

    def renew(self) -> None:
        """As `prepare`, after packages may have changed."""

    def close(self) -> None:
        """End what waits; safe to call more than once."""


class Program(Protocol):
    """What each node of a launch runs in the place of torchrun and its workers: a feature's own."""

    name: str  # of the argument of `run` that asks for it, and of the record of its begin
    what: str  # it runs, in the plural
    agent: str  # what to call its process

    def files(self) -> Mapping[str, str]:
        """Return the files that it needs in its folder: name -> contents, ASCII."""

    def command(self, folder: str) -> list[str]:
        """Return its argv. Its output goes to files in `folder`, where torchrun would put those of workers."""

    def label(self, node: int, number: int) -> str:
        """Return what the log puts before the lines of the part `number`, from 0."""

    def cause(self, folder: str, node: int, host: str, how_ended: Callable[[int], str]) -> Cause | None:
        """Return why it has failed, where it knows; `how_ended` puts an exit code into words."""


if TYPE_CHECKING:
    from .watchers import Feature


@dataclass(frozen=True)
class Plan:
    """One launch on one node."""

    spec: LaunchSpec
    main_addr: str  # of the control node, as this node reaches it
    machine: Machine  # what this node may use
    write: Write  # takes the workers' output
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)  # the control node's counts
    facts: Mapping[str, Any] = field(default_factory=dict)  # what must agree besides `spec`, as the torch version
    grace_s: float = 30.0  # that workers have between SIGTERM and SIGKILL
    silence_s: float = 30.0  # that a process of this node may be stopped by a signal
    services: Services = field(default_factory=Services)  # what the user has asked features for
    store: ValueStore | None = None  # takes what they store; None where no flow runs
    logs: str = "node"  # whose lines are shown where, out of `parsing.LOGS`
    nproc_why: str = ""  # why there are so many processes on each node
    warm: str = "off"  # what starts faster than cold, out of `parsing.WARM`
    warm_node: WarmStarts | None = None  # who does that, where somebody can
    goes_on: bool = False  # whether the same call of `run` has made the launch before
    features: Sequence[Feature] = ()  # what the launch has besides
    is_ours: bool = False  # whether it goes before one of the user's, so that the log need not tell as much
    program: Program | None = None  # what each node runs in the place of torchrun and its workers

    @property
    def ranks(self) -> list[int]:
        """The global ranks of this node."""
        return [self.spec.global_rank(local_rank) for local_rank in range(self.spec.nproc)]

    @property
    def is_elastic(self) -> bool:
        """Whether torchrun itself may start workers again."""
        return self.spec.min_nodes is not None

    @property
    def nproc(self) -> int:
        """How many workers this node has."""
        return self.spec.nproc if self.program is None else 0

    @property
    def runs(self) -> str:
        """What the launch runs, for the gang: the workers, or the name of a program."""
        return WORKERS if self.program is None else self.program.name

    @property
    def has_warm_workers(self) -> bool:
        """Whether workers start faster than cold: programs in Python can that torchrun starts as processes."""
        return self.warm == "workers" and not {"no-python", "run-path"} & set(dict(self.spec.options))

    def prepare_warm(self) -> None:
        """Make ready for another agent of this step: of a restart, or of its next launch."""
        if self.warm_node is not None and self.warm != "off":
            self.warm_node.prepare()

    @property
    def agent(self) -> str:
        """What to call the process that starts the workers, or what runs in their place."""
        return "torchrun agent" if self.program is None else self.program.agent

    @property
    def shares_machine(self) -> bool:
        """Whether nodes of this gang share this machine, and so their terminal."""
        return self.machine.nodes_here > 1

    @property
    def shows_failures(self) -> bool:
        """Whether all that any worker of this node writes is shown, so also what it writes of its failure."""
        return None not in map(self.label, range(max(1, self.nproc)))

    def label(self, local_rank: int) -> str | None:
        """Return what the log puts before the lines of a worker; None if they are not shown."""
        spec = self.spec
        if self.program is not None:
            is_hidden = self.logs == "rank0" and spec.node_index != 0
            return None if is_hidden else self.program.label(spec.node_index, local_rank)
        if spec.shown_local_ranks is not None and local_rank not in spec.shown_local_ranks:
            return None
        if self.logs == "rank0" and spec.global_rank(local_rank) != 0:
            return None
        if self.is_elastic:  # torchrun gives ranks out anew at each restart
            return f"[node {spec.node_index} local rank {local_rank}] "
        return f"[rank {spec.global_rank(local_rank)}] "
