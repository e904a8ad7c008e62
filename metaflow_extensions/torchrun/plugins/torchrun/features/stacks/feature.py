"""Stacks on demand: what every rank of a gang does now. ``python flow.py torchrun stacks`` asks; nothing is stopped.

The way of a question: the command stores a request beside the gang's records (`task/requests`). The control node finds
it and hands it to the `StacksKeeper`, which asks all nodes. On each node the `StacksWatcher` asks the workers, in a
thread of its own. When all nodes have answered, or their time is up, the keeper gives the answer to be stored.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

from ...errors import TorchrunError
from ...gang.keepers import Keeper, Plain, Remarks
from ...gang.protocol import Told
from ...gang.wire import from_plain, to_plain
from ...machine.stacks import FOLDER, HOOK, Found, ask_workers, find_py_spy, hook_environment
from ...node.plan import Plan
from ...node.watchers import Feature, Here, Variables, Watcher
from ...records.requests import GangCommand
from .command import COMMAND
from .told import GangStacks, NodeStacks

# What the workers of one node have to answer: the signal takes a tenth of a second, py-spy with native frames seconds.
_WORKERS_S = 4.0
_WORKERS_NATIVE_S = 15.0
# What a node has besides, until its answer must have come to the control node.
_NODES_MARGIN_S = 4.0
# All stacks of one node go in one message (`MAX_TOLD_BYTES`), in which JSON may double a text. An answer of the whole
# gang is one file.
_NODE_CHARS = 200_000
_GANG_CHARS = 16_000_000
_LEAST_CHARS = 200


class Stacks(Feature):
    """Whoever can write the datastore may ask what all ranks are doing."""

    name = "stacks"

    def keeper(self, num_nodes: int, of_all: bool) -> Keeper | None:
        """Return what asks the nodes; only the control node does."""
        return StacksKeeper(num_nodes) if of_all else None

    def variables(self, plan: Plan, folder: str) -> Variables:
        """Return what lets workers be asked."""
        return Variables(hook_environment(os.path.join(folder, FOLDER)), folders=(FOLDER,), hooks=(HOOK,))

    def watcher(self, here: Here) -> Watcher:
        """Return what asks the workers of this node."""
        return StacksWatcher(here)

    def command(self) -> GangCommand:
        """Return ``python flow.py torchrun stacks``."""
        return COMMAND


# --- on each node -----------------------------------------------------------------------------


class StacksWatcher(Watcher):
    """Asks the workers of this node in a thread of its own, so that the launch goes on meanwhile.

    `asked` and `poll` are called in the thread that calls `run`. The other thread sets `_answer`, once, at its end.
    One question at a time: one that comes meanwhile is the next, and a third takes its place.
    """

    def __init__(self, here: Here) -> None:
        self._here = here
        self._thread: threading.Thread | None = None
        self._answer: Plain | None = None
        self._next: Plain | None = None

    def asked(self, data: Plain) -> None:
        """Ask the workers, or do it as soon as those who are asked have answered."""
        self._next = data
        self._start()

    def poll(self) -> Plain | None:
        """Return the answer, when it is there."""
        if self._thread is None or self._thread.is_alive():
            return None
        answer, self._thread, self._answer = self._answer, None, None
        self._start()
        return answer

    def _start(self) -> None:
        if self._thread is None and self._next is not None:
            data, self._next = self._next, None
            # A daemon: a worker that the kernel holds must not keep the task from its end.
            # Both here: the table of workers belongs to the thread that calls `run`.
            ended = [rank for rank in self._here.plan.spec.ranks if self._here.has_ended(rank)]
            about = data, dict(self._here.running()), ended
            self._thread = threading.Thread(target=self._ask, args=about, name="torchrun-asks", daemon=True)
            self._thread.start()

    def _ask(self, data: Plain, workers: dict[int, int], ended: list[int]) -> None:
        try:
            found = self._found(bool(data.get("native")), workers)
            found.ranks.update({rank: Found("its process has ended", "", "") for rank in ended})
            self._answer = {"id": data["id"], "found": to_plain(found)}
        except Exception as error:  # sent, so that nobody waits for this node
            self._answer = {"id": data["id"], "failed": f"{type(error).__name__}: {error}"}

    def _found(self, native: bool, workers: dict[int, int]) -> NodeStacks:
        here, py_spy = self._here, find_py_spy() if native else None
        if native and py_spy is None:
            raise TorchrunError("py-spy is not installed there; install it, or leave out --native")
        within_s = _WORKERS_NATIVE_S if native else _WORKERS_S
        folder = os.path.join(here.folder, FOLDER)
        found = ask_workers(workers, folder, within_s, py_spy, native, is_ending=False)
        share = min(_NODE_CHARS // max(1, len(workers)), _GANG_CHARS // here.plan.spec.world_size)
        ranks = {rank: replace(each, text=_fitting(each, share)) for rank, each in found.items()}
        return NodeStacks(here.host, ranks)


def _fitting(found: Found, share: int) -> str:
    """Return the stacks, shortened to `share` characters where JSON doubles a character at most, else to fewer."""
    share = share if found.text.isascii() else share // 6  # JSON writes an emoji as 12 characters
    return found.shortened(max(_LEAST_CHARS, share))


# --- on the control node ----------------------------------------------------------------------


class StacksKeeper(Keeper):
    """Asks all nodes, and keeps what they have answered until it is whole. One question at a time: the newest."""

    has_record = False

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._running: set[int] = set()  # nodes whose workers run
        self._launch: int | None = None
        self._generation: int | None = None  # of the last answer
        self._asked: Plain | None = None  # the open question
        self._due_at_s = 0.0
        self._found: dict[int, NodeStacks] = {}
        self._missing: dict[int, str] = {}

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Remember that workers run now, on all nodes."""
        self._launch, self._generation = launch, None
        self._running = set(range(self._num_nodes))

    def request(self, data: Plain, at_s: float) -> Remarks:
        """Ask all nodes whose workers run."""
        if not self._running:
            return Remarks(answer={"id": data["id"], "found": to_plain(GangStacks())})
        native = bool(data.get("native"))
        self._asked = {"id": data["id"], "native": native}
        self._due_at_s = at_s + (_WORKERS_NATIVE_S if native else _WORKERS_S) + _NODES_MARGIN_S
        ended = set(range(self._num_nodes)) - self._running
        self._found, self._missing = {}, dict.fromkeys(sorted(ended), "its workers have ended")
        return Remarks(ask=self._asked)

    def handle(self, node: int, told: Told, at_s: float) -> Remarks:
        """Keep what a node has answered."""
        if self._asked is None or told.data["id"] != self._asked["id"]:
            return Remarks()  # an answer that comes too late
        if "failed" in told.data:
            self._missing[node] = f"its workers could not be asked ({told.data['failed']})"
        else:
            self._found[node] = from_plain(NodeStacks, told.data["found"], "stacks")
        self._generation = told.generation
        return self._answer_if_whole()

    def ended(self, node: int, ok: bool) -> Remarks:
        """Expect nothing more of a node whose workers have ended."""
        self._running.discard(node)
        if self._asked is None or node in self._found:
            return Remarks()
        self._missing.setdefault(node, "its workers have ended")
        return self._answer_if_whole()

    def tick(self, at_s: float, where: Any) -> Remarks:
        """Answer without the nodes that are late."""
        if self._asked is None or at_s < self._due_at_s:
            return Remarks()
        for node in range(self._num_nodes):
            if node not in self._found:
                self._missing.setdefault(node, "it has not answered in time")
        return self._answer_if_whole()

    def _answer_if_whole(self) -> Remarks:
        if self._asked is None or len(self._found.keys() | self._missing.keys()) < self._num_nodes:
            return Remarks()
        found, missing = dict(sorted(self._found.items())), dict(sorted(self._missing.items()))
        whole = GangStacks(self._launch, self._generation, found, missing, self._asked["native"])
        answer = {"id": self._asked["id"], "found": to_plain(whole)}
        self._asked, self._found, self._missing = None, {}, {}
        return Remarks(answer=answer)
