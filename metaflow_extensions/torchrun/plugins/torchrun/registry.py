"""The records of a gang in Metaflow's datastore: its control node's address, its view, and what commands ask of it.

Beside them lies what others report about a control node that ended unexpectedly. All of it is metadata of the control
node's task (`compat.datastore.metadata_of`). That works alike on local disks, S3, Azure and Google Cloud Storage, and
its names carry the attempt, so that a retry never reads what the attempt before has left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .compat.datastore import metadata_of
from .errors import GangError, TorchrunError
from .gang.view import GangView, Word, told_by_others
from .gang.wire import from_plain, to_plain

# Who may report that the control node is gone: node 1, the task that replaces it, or the process that looks after the job.
# Each writes a file of its own, so that none must read before it writes. The first file found counts.
_WORDS = {"member": "torchrun_lost.json", "replacement": "torchrun_replaced.json", "job": "torchrun_job.json"}

T = TypeVar("T")


@dataclass(frozen=True)
class AddressRecord:
    """How to reach the control node."""

    addresses: tuple[str, ...]  # names and addresses to try, in order
    port: int
    token: str  # the gang's secret; whoever can read the step's datastore knows it
    host: str = ""  # the control node's host name


@dataclass(frozen=True)
class Request:
    """What a command wants to know of a gang that runs."""

    id: str  # something random
    of: dict[str, Any]  # see `gang.messages.Ask`


@dataclass(frozen=True)
class Reply:
    """The gang's answer to a request."""

    request: Request
    time: float  # when it was made, in seconds since 1970, by the control node's clock
    data: dict[str, Any]


@dataclass(frozen=True)
class Requests:
    """The last request of each kind, `What`. They are stored beside the gang's view, where the gang looks for them."""

    last: dict[str, Request] = field(default_factory=dict)


@dataclass(frozen=True)
class Replies:
    """The last reply of each kind."""

    last: dict[str, Reply] = field(default_factory=dict)


_NAMES = {AddressRecord: "torchrun_gang.json", Requests: "torchrun_requests.json", Replies: "torchrun_answers.json"}
_VIEW = "torchrun_view.json"


class Registry:
    """The stored records of one attempt of one gang, in the run's `FlowDataStore`.

    Methods raise GangError if the datastore fails, which has patience of its own (S3: 7 tries).
    """

    def __init__(self, flow_datastore: Any, run_id: str, step_name: str, control_task_id: str, attempt: int) -> None:
        self.where = f"{run_id}/{step_name}/{control_task_id}, attempt {attempt}"
        # Looked up once, here: a missing private name fails now. What fails later is the datastore.
        self._load_metadata, self._save_metadata = metadata_of(
            flow_datastore, run_id, step_name, control_task_id, attempt
        )

    def save(self, record: AddressRecord | Requests | Replies) -> None:
        """Write a record, in the place of the last one of its kind."""
        self._save(_NAMES[type(record)], to_plain(record))

    def load(self, kind: type[T]) -> T | None:
        """Return the record of a kind if there is one."""
        name = _NAMES[kind]
        with self._telling():
            found = self._load(name)[name]
        return None if found is None else from_plain(kind, found, name)

    def save_view(self, view: GangView) -> None:
        """Write what is known of the gang."""
        self._save(_VIEW, to_plain(view))

    def load_view(self) -> GangView | None:
        """Return what `save_view` wrote last, or None, with what others told of the control node's end.

        Raises ValueError where another version has stored it.
        """
        with self._telling():
            found = self._load(_VIEW, *_WORDS.values())
        words = [from_plain(Word, found[name], "the word") for name in _WORDS.values() if found[name] is not None]
        return told_by_others(None if found[_VIEW] is None else GangView.read(found[_VIEW]), words)

    def save_word(self, word: Word, who: Literal["member", "replacement", "job"]) -> None:
        """Write that the control node is gone."""
        self._save(_WORDS[who], to_plain(word))

    # --- the datastore --------------------------------------------------------------------------

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except TorchrunError:  # raised by a signal's handler, not by the datastore
            raise
        except Exception as error:
            raise GangError(
                f"The nodes find each other through Metaflow's datastore, but it failed for {self.where}: "
                f"{type(error).__name__}: {error}. Check that it is up and that this task may read and write there."
            ) from error

    def _save(self, name: str, data: dict[str, Any]) -> None:
        with self._telling():
            self._save_metadata({name: data})

    def _load(self, *names: str) -> dict[str, Any]:
        """Return what is stored under each name, or None; no need to check for it first."""
        try:
            found: dict[str, Any] = self._load_metadata(list(names))
            return found
        except ValueError:  # half written: Metaflow 2.13 writes a local file in place, 2.19 renames it
            return {name: self._load(name)[name] if len(names) > 1 else None for name in names}


def growing_pauses(first_s: float = 0.05) -> Iterator[float]:
    """Yield pauses between tries, in seconds: each about twice the one before, and none over 2 s.

    They differ from node to node: thousands that try at once would else do so again.
    """
    pause_s = first_s
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause_s = min(pause_s * 2, 2.0)
