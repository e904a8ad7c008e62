"""`TorchrunResult`, which `run` returns."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import MetaflowException, TorchrunError

if TYPE_CHECKING:
    from .outputs import Outputs

_T = TypeVar("_T")  # private, or stubs would have it twice

# What a stored result becomes when it is loaded: itself where Metaflow and this extension are installed, elsewhere a
# plain namespace. A pickle can name functions only, and only the standard library's are everywhere.
_REVIVED = (
    "(lambda name, find: object.__new__(__import__(name, fromlist=['']).TorchrunResult)"
    " if find('metaflow') and all(find('.'.join(name.split('.')[:end + 1])) for end in range(name.count('.') + 1))"
    " else __import__('types').SimpleNamespace())"
)


@dataclass(frozen=True, repr=False)
class TorchrunResult(Generic[_T]):
    """One finished launch, seen from one node.

    It can be stored as an artifact. Loaded where this extension is not installed, it is a
    `types.SimpleNamespace` with the same attributes.

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
        One entry for each restart of the gang: its ``generation`` (int) and its ``cause`` (dict), and with ``left`` and
        ``came`` (lists of int) the nodes that take part no more, and those that take part instead. A
        node whose task is started again is in both.
    duration_s : float
        Seconds from *go* to the last node's end, by this node's clock.
    exit_codes : dict of int to int
        Global rank -> exit code of this node's workers.
    values : dict of int to bytes
        Global rank -> pickled value that a function has returned; empty for a script. `rank`, `local_rank` and
        iteration unpickle them.
    nodes : tuple of int
        The nodes that took part in the last generation, in the order of their ranks.
    gathered : bool
        Whether `values` are those of all nodes, which ``gather=True`` brings to the control node alone.
    events : tuple of dict
        What has happened to the gang since the launch before, in order, on the control node; empty on the
        others. ``docs/seeing.md`` lists the fields.
    metrics : dict of str to float
        What rank 0 has reported last, by name, with ``"step"`` and ``"total"``. See ``docs/metrics.md``.
    history : dict of str to list of (int, float)
        The step and the value of rank 0's reports, by name: at most 200 points for each of at most 20 names. Only the
        result of the control node, ``inputs[0].result`` in a join, has them.
    goodput : dict of str to float, int or None
        Where the time of the attempt went until the launch's end, on the control node; ``docs/metrics.md`` lists the keys.
    stopped : bool
        Whether ranks have left their loop because of ``python flow.py torchrun stop``.
    outputs : Outputs or None
        The files that ``run(outputs=...)`` has stored; None without that argument. With ``outputs_from="all"``, the
        control node's result has those of all nodes, and another node's its own.
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
    values: dict[int, bytes] = field(default_factory=dict)
    gathered: bool = False
    events: tuple[dict[str, Any], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: Outputs | None = None
    nodes: tuple[int, ...] = ()
    history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    stopped: bool = False
    goodput: dict[str, Any] = field(default_factory=dict)
    has_values: bool = field(default=True, compare=False)  # whether a function was launched, not a script

    def __repr__(self) -> str:
        from .texts import counted, duration  # not with Metaflow

        ranks = f"{counted(self.world_size, 'rank')} on {counted(len(self.nodes) or self.num_nodes, 'node')}"
        parts = [f"launch {self.launch}", ranks, duration(self.duration_s)]
        parts += [counted(len(self.restarts), "restart")] if self.restarts else []
        parts += [counted(len(self.values), "value")] if self.values else []
        return f"<TorchrunResult: {', '.join(parts)}>"

    def rank(self, rank: int) -> _T:
        """Return what the function returned on a global rank.

        Raises
        ------
        LookupError
            If this result does not have it: it is of a script, or the rank is another node's and the values were
            not gathered.
        TorchrunError
            If the value can't be loaded here.
        """
        if rank not in self.values:
            raise LookupError(self._why_not(rank))
        try:
            value: _T = pickle.loads(self.values[rank])  # noqa: S301 - what the user's own workers have left
        except (OSError, MemoryError, MetaflowException):
            raise  # not the value's fault: a disk, or news of the gang
        except Exception as error:
            kind = self.values[rank].rpartition(b"\n")[2].decode(errors="replace")  # see `function_worker.store`
            raise TorchrunError(
                f"Rank {rank} returned a {kind}, which can't be loaded here ({type(error).__name__}: {error}). "
                "Return plain data instead: state_dict() of a model, of a DistributedDataParallel that of its module; "
                "of an exception its text. Modules that the value needs must be installed here, too."
            ) from error
        return value

    def local_rank(self, local_rank: int) -> _T:
        """Return what the function returned on a local rank of this node; raises as `rank`."""
        if not 0 <= local_rank < self.nproc_per_node:
            raise LookupError(f"There is no local rank {local_rank}; a node has 0 to {self.nproc_per_node - 1}.")
        return self.rank(self._own_ranks()[local_rank])

    def __iter__(self) -> Iterator[_T]:
        """Iterate over what the function returned, in the order of ranks: this node's or, if `gathered`, all.

        Of a script there is nothing. Raises LookupError where the values were lost with the task of this node.
        """
        return map(self.rank, self._ranks() if len(self) else ())

    def __len__(self) -> int:
        """Return how many values iteration gives; 0 for a script."""
        if self._lost and not self.values:
            raise LookupError(self._lost)
        return len(self._ranks()) if self.values else 0

    @property
    def _lost(self) -> str:
        """What became of the values if the task that ran this node's workers was lost, and another took its place."""
        if self.exit_codes or not self.nodes or not self.has_values:
            return ""
        return (
            f"The task of node {self.node_index} that took part in launch {self.launch} was lost, and what a function had "
            "returned there with it. With run(..., gather=True) the values are stored when the launch has ended."
        )

    def __bool__(self) -> bool:
        """Return True: a launch has ended well, even if it has no values."""
        return True

    def __setstate__(self, state: dict[str, Any]) -> None:
        outputs = state.get("outputs")
        if isinstance(outputs, tuple):
            from .outputs import Outputs

            outputs = Outputs(*outputs)
        vars(self).update({**state, "outputs": outputs})

    def _ranks(self) -> range:
        return range(self.world_size) if self.gathered else self._own_ranks()

    def _own_ranks(self) -> range:
        """The global ranks of this node: a node without ranks gets no result."""
        first = (self.nodes.index(self.node_index) if self.nodes else self.node_index) * self.nproc_per_node
        return range(first, first + self.nproc_per_node)

    def _why_not(self, rank: int) -> str:
        if not 0 <= rank < self.world_size:
            return f"There is no rank {rank}; the launch had 0 to {self.world_size - 1}."
        if self._lost and rank in self._own_ranks():
            return self._lost
        if rank in self.exit_codes or self.gathered or not self.values:
            return f"Rank {rank} returned no value: a script has none, nor has a function that ends by sys.exit()."
        have = ", ".join(map(str, self.values))
        return (
            f"This result, of node {self.node_index}, has the values of ranks {have}, not of {rank}. Look at the result of "
            "that rank's node, or bring all values to the control node with run(..., gather=True)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        expression = f"{_REVIVED}({__name__!r}, __import__('importlib.util').util.find_spec)"
        # As plain data: where this extension is not installed, its other classes are not, either.
        outputs = None if self.outputs is None else self.outputs.__reduce__()[1]
        return eval, (expression,), {**vars(self), "outputs": outputs}
