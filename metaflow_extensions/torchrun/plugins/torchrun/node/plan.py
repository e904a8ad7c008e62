"""The plan of one launch on one node: everything that it needs, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..gang.policy import LaunchPolicy
from ..guardian.agent_events import Refused
from ..guardian.guardian import Options
from ..guardian.guardian_process import GuardianProcess
from ..launch.spec import LaunchSpec
from ..launch.transfer import ValueStore
from ..logs.pipes import Write
from ..machine.accelerators import Machine
from .services import Services


class WarmStarts(Protocol):
    """Starts the agents of one node faster than cold; belongs to the step's thread."""

    def start(
        self, command: list[str], workers: int, env: Mapping[str, str], options: Options
    ) -> GuardianProcess | Refused:
        """Return a guardian that starts an agent warm, and so many of its workers; or why there is none."""

    def prepare(self) -> None:
        """Prepare a spare for the next agent, in the background; raises nothing."""

    def renew(self) -> None:
        """As `prepare`, but replace a spare that may have imported packages which have changed since."""

    def close(self) -> None:
        """End the spare; safe to call more than once."""


if TYPE_CHECKING:
    from .watchers import Feature


@dataclass(frozen=True)
class Plan:
    """One launch on one node."""

    spec: LaunchSpec
    main_addr: str  # of the control node, as this node reaches it
    machine: Machine  # what this node may use
    write: Write  # writes the workers' output
    policy: LaunchPolicy = field(default_factory=LaunchPolicy)  # the control node's counts
    # What must be equal on all nodes besides `spec`, such as the torch version.
    facts: Mapping[str, Any] = field(default_factory=dict)
    grace_s: float = 30.0  # that workers have between SIGTERM and SIGKILL
    silence_s: float = 30.0  # how long a process of this node may be stopped by a signal
    services: Services = field(default_factory=Services)  # features' services that this call of `run` asks for
    store: ValueStore | None = None  # where they store values; None outside of a flow
    logs: str = "node"  # which lines are shown where: one of `parsing.LOGS`
    nproc_why: str = ""  # why there are so many processes on each node
    warm: str = "off"  # what starts warm: one of `parsing.WARM`
    warm_node: WarmStarts | None = None  # what starts it warm, if a feature can
    commands: Sequence[tuple[str, ...]] = ()  # those of before_run
    features: Sequence[Feature] = ()  # the features of the launch

    @property
    def has_warm_workers(self) -> bool:
        """Whether workers start warm: possible for Python programs that torchrun starts as processes."""
        return self.warm == "workers" and "no-python" not in dict(self.spec.options)

    def prepare_warm(self) -> None:
        """Prepare a spare for the next agent of this step: of a restart, or of the next launch."""
        if self.warm_node is not None and self.warm != "off":
            self.warm_node.prepare()

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
        return self.logs == "rank0" and spec.global_rank(local_rank) != 0

    def label(self, local_rank: int) -> str:
        """Return the label of a worker's lines in the log."""
        spec = self.spec
        return f"[rank {spec.global_rank(local_rank)}] "
