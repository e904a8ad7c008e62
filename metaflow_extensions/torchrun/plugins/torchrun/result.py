"""What `run` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class TorchrunResult:
    """One finished launch, seen from one node.

    Stored as an artifact, it is pickled as a `types.SimpleNamespace` with the same attributes, so
    that it can be loaded where this extension is not installed.

    Attributes
    ----------
    launch : int
        Number of the launch in its step, from 0.
    num_nodes : int
        Nodes of the gang.
    node_index : int
        This node.
    nproc_per_node : int
        Workers on each node.
    world_size : int
        Workers over all nodes.
    command : str
        The torchrun command of this node's last generation, quoted for a shell.
    restarts : list of dict
        One entry for each restart of the gang: its ``generation`` (int) and its ``cause`` (dict).
    duration_s : float
        Seconds from *go* to the last node's end, by this node's clock.
    exit_codes : dict of int to int
        Global rank -> exit code of this node's workers.
    """

    launch: int
    num_nodes: int
    node_index: int
    nproc_per_node: int
    world_size: int
    command: str
    restarts: list[dict[str, Any]]
    duration_s: float
    exit_codes: dict[int, int]

    def __reduce__(self) -> tuple[Any, ...]:
        # Only names of the standard library may stand in the pickle.
        return SimpleNamespace, (), asdict(self)
