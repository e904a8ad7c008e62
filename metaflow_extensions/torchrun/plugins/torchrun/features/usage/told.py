"""What a node tells of its usage, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_S = 5.0
"""How often a node of a small gang measures."""
# Each sample wakes the control node's task, so this is the limit for all nodes together.
_SAMPLES_PER_S = 10


@dataclass(frozen=True)
class Used:
    """The usage of this node now, or since the last sample."""

    of: str  # what CPU and memory cover: the "container", or the launch's "processes"
    values: dict[str, float] = field(default_factory=dict)  # by kind, see `show.usage_part`; only the measured ones
    limits: dict[str, float] = field(default_factory=dict)  # cpus, memory_mib, gpu_memory_mib, gpus


def step_s(num_nodes: int) -> float:
    """Return the interval in which each node of a gang measures, in seconds."""
    return max(STEP_S, num_nodes / _SAMPLES_PER_S)
