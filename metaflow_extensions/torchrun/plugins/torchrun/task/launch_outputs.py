"""``run(outputs=...)``: stores files of a launch in Metaflow's datastore when its workers have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import TorchrunConfigError, TorchrunError
from ..gang.messages import CONTROL
from ..gang.wire import Plain
from ..launch.call import Call
from ..launch.run_settings import RunSettings
from ..launch.transfer import ToStore, ValueStore
from ..outputs import Outputs
from .output_storing import FilesToStore, StoredOutputs


def outputs_of(run: RunSettings, node: int, store: ValueStore | None) -> LaunchOutputs | None:
    """Return what stores the files that `run` names; raises TorchrunConfigError."""
    patterns, whose = run.outputs, run.outputs_from
    if patterns is None:
        if whose is None:
            return None
        raise TorchrunConfigError(f"run(outputs_from={whose!r}) says whose outputs to store, but outputs names none.")
    if store is None:
        raise TorchrunConfigError("run(outputs=...) needs a datastore, which only a step of a flow has.")
    return LaunchOutputs(patterns, whose == "all", node, store)


class LaunchOutputs:
    """The files of one launch on this node; `patterns` are relative to the workers' working directory."""

    def __init__(self, patterns: tuple[str, ...], of_all: bool, node: int, store: ValueStore) -> None:
        self.stores = of_all or node == CONTROL
        self._patterns, self._of_all = patterns, of_all
        self._node, self._store = node, store
        self._folder = os.getcwd()
        self._since = time.time()  # files that are older are not of this call of `run`
        self._files: FilesToStore | None = None  # of this generation

    def begin(self, call: Call) -> None:
        """Forget what another generation has stored; note where the workers run."""
        self._files, self._folder = None, call.cwd

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

    def _known(self, told: Plain) -> Outputs:
        """Return the control node's files, or those of all nodes on it; another node's own, where each has some."""
        of = {int(node): tuple(each) for node, each in told.get("nodes", {}).items()}
        if self._of_all and self._node != CONTROL:
            kept = self._kept
            # A task that has come in the place of another has stored none; it is told those of that one.
            own = of.get(self._node) if kept is None else (kept.key, kept.files, kept.size)
            of = {} if own is None else {self._node: own}
        return Outputs(self._store.address, of)
