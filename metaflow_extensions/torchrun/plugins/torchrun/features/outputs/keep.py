"""Keeps, on the control node, where the outputs of launches are stored."""

from __future__ import annotations

from dataclasses import asdict

from ...errors import TorchrunError
from ...gang.keepers import Happened, Keeper, Plain, Remarks
from ...gang.messages import CONTROL, Report
from ...gang.texts import counted, size_text
from ...gang.wire import from_plain
from .storing import StoredOutputs

# For how many nodes, over all launches, the places of outputs are kept: some hundred kilobytes.
_MAX_KEPT = 4000


class OutputsKeeper(Keeper):
    """Keeps where the outputs of the last launches are, as many as fit. The files stay, and results know them."""

    def __init__(self) -> None:
        self._launches: dict[int, dict[int, StoredOutputs]] = {}  # by launch and node
        self._left_out = 0  # launches that are not there any more
        self._is_wanted = False  # whether any launch was to store some

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget what a generation before has stored."""
        self._launches.pop(launch, None)
        self._is_wanted |= bool(policy)

    def handle(self, node: int, told: Report, at_s: float) -> Remarks | None:
        """Keep where a node's files are."""
        kept = from_plain(StoredOutputs, told.data, "outputs")
        self._launches.setdefault(told.launch, {})[node] = kept
        while len(self._launches) > 1 and sum(map(len, self._launches.values())) > _MAX_KEPT:
            del self._launches[next(iter(self._launches))]
            self._left_out += 1
        text = f"{counted(kept.files, 'file')}, {size_text(kept.size)}"
        return Remarks(happened=(Happened("stored", node, text),))

    def record(self) -> Plain:
        """Return where the files are, by launch and node."""
        launches = self._launches.items()
        return {str(launch): {str(node): asdict(kept) for node, kept in of.items()} for launch, of in launches}

    def besides(self) -> Plain:
        """Return whether there should be any, and how many launches are left out."""
        return {"wants_outputs": self._is_wanted, "launches_left_out": self._left_out}

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return where the files are: for the control node those of all nodes, for others the control node's."""
        of = sorted(self._launches.get(launch, {}).items())
        nodes = {str(node): [kept.key, kept.files, kept.size] for node, kept in of if to_control or node == CONTROL}
        return {"nodes": nodes} if nodes else {}


PART = OutputsKeeper
