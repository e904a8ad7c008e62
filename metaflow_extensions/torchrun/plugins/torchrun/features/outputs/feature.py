"""The feature ``run(outputs=...)``: stores files of a launch in Metaflow's datastore when its workers have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...errors import TorchrunConfigError, TorchrunError
from ...gang.keepers import Happened, Keeper, Plain, Remarks
from ...gang.protocol import CONTROL, Told
from ...gang.texts import counted, size_text
from ...gang.wire import from_plain
from ...launch.run_settings import RunSettings
from ...launch.spec import LaunchSpec
from ...launch.transfer import ValueStore
from ...node.services import RunCall, Service, ToStore
from ...node.watchers import Feature
from ...outputs import Outputs as Stored
from ...records.requests import GangCommand
from ...records.summary import Summary
from ...show.parts.model import Facts, Part
from .command import COMMAND
from .storing import FilesToStore, StoredOutputs

# For how many nodes, over all launches, the places of outputs are kept: some hundred kilobytes.
_MAX_KEPT = 4000
_SHOWN_LAUNCHES = 20  # the last, on a page


class Outputs(Feature):
    """Files that a launch leaves."""

    name = "outputs"
    after = "nodes"

    def policy(self, run: RunSettings) -> Plain:
        """Return whether a launch is to store files."""
        return {} if run.outputs is None else {"wanted": True}

    def service(self, call: RunCall) -> Service | None:
        """Return what stores the files that `run` names."""
        patterns, whose = call.settings.outputs, call.settings.outputs_from
        if patterns is None:
            if whose is None:
                return None
            raise TorchrunConfigError(
                f"run(outputs_from={whose!r}) says whose outputs to store, but outputs names none."
            )
        if call.store is None:
            raise TorchrunConfigError("run(outputs=...) needs a datastore, which only a step of a flow has.")
        return OutputsService(patterns, whose == "all", call.node, call.store)

    def keeper(self, num_nodes: int) -> Keeper | None:
        """Return what keeps where the files of all nodes are."""
        return OutputsKeeper()

    def command(self) -> GangCommand | None:
        """Return the command that lists and downloads the files."""
        return COMMAND

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return how much each launch has stored."""
        rows = []
        for launch, nodes in list((kept or {}).items())[-_SHOWN_LAUNCHES:]:
            files, size = (sum(each[name] for each in nodes.values()) for name in ("files", "size"))
            rows.append((f"launch {launch}", f"{counted(files, 'file')}, {size_text(size)}"))
        return (Facts(tuple(rows)),) if rows else ()


class OutputsService(Service):
    """The files of one launch on this node; `patterns` are relative to the workers' working directory."""

    def __init__(self, patterns: tuple[str, ...], of_all: bool, node: int, store: ValueStore) -> None:
        self.stores = of_all or node == CONTROL
        self._patterns, self._of_all = patterns, of_all
        self._node, self._store = node, store
        self._folder = os.getcwd()
        self._since = time.time()  # files that are older are not of this call of `run`
        self._files: FilesToStore | None = None  # of this generation

    def begin(self, spec: LaunchSpec) -> None:
        """Forget what another generation has stored; note where the workers run."""
        self._files, self._folder = None, spec.cwd or self._folder

    def to_store(self, error: TorchrunError | None, within_s: float | None) -> ToStore | None:
        """Return the files, unless they are stored."""
        if not self.stores or self._kept is not None:
            return None
        self._files = FilesToStore(self._patterns, self._folder, self._store, self._since, within_s)
        return self._files

    @property
    def _kept(self) -> StoredOutputs | None:
        return None if self._files is None else self._files.kept

    def result(self, told: Plain, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Return the stored files that this node knows of."""
        return {"outputs": self._known(told)}

    def failed(self, error: TorchrunError, told: Plain) -> None:
        """Put the files that were stored after a failure on the error."""
        error.outputs = self._known(told)

    def _known(self, told: Plain) -> Stored:
        """Return the control node's files, or those of all nodes on it; another node's own, where each has some."""
        of = {int(node): tuple(each) for node, each in told.get("nodes", {}).items()}
        if self._of_all and self._node != CONTROL:
            kept = self._kept
            of = {} if kept is None else {self._node: (kept.key, kept.files, kept.size)}
        return Stored(self._store.address, of)


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

    def handle(self, node: int, told: Told, at_s: float) -> Remarks | None:
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
