"""The cards of a task: Metaflow's own objects (2.19), but the commands that make other types of cards are not run."""

import tempfile
from itertools import pairwise

from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.plugins.cards.card_creator import CardCreator
from metaflow.plugins.cards.component_serializer import CardComponentCollector
from metaflow.plugins.datastores.local_storage import LocalStorage


class Metadata:
    """Metadata of a flow. `registered` has task, card and tags."""

    TYPE = "local"

    def __init__(self):
        self.registered = []

    def register_metadata(self, run_id, step_name, task_id, entries):
        self.registered += [(f"{run_id}/{step_name}/{task_id}", each.field, each.tags) for each in entries]


class TaskCards(CardCreator):
    """`cards` has the task's cards, `commands` the options of the commands that Metaflow would run."""

    def __init__(self, flow, folder):
        super().__init__(["--quiet"], self._register)
        self.collector, self.commands, self._known = CardComponentCollector(None, self), [], set()
        self._folder, self.metadata = folder, Metadata()
        root = str(folder / "flows")
        self.datastore = FlowDataStore(flow, metadata=self.metadata, storage_impl=LocalStorage, ds_root=root)

    def _register(self, card_uuid):
        is_first = card_uuid not in self._known
        self._known.add(card_uuid)
        return is_first, {"uuid": card_uuid} if is_first else {}

    def add(self, kind, name):
        """Add a card of a type, with an id."""
        attributes = {"type": kind, "timeout": None, "save_errors": True}
        self.collector._add_card(kind, name, attributes, None, runtime_card=True, refresh_interval=1000)

    @property
    def cards(self):
        return list(self.collector._card_component_store.values())

    def stored(self):
        """Return the text of all pages and data that are stored, by name without their cards' numbers."""
        found = (self._folder / ".metaflow" / "mf.cards").rglob("*-*.*")
        return {f"{each.name.rpartition('-')[0]}.{each.suffix[1:]}": each.read_text() for each in found}

    def _run_command(self, cmd, card_uuid, env, wait=True, timeout=None):
        self.commands.append({**dict(pairwise(cmd)), "wait": wait})
        return b"", False


def cards_of_task(monkeypatch, folder, *kinds, task="Flow/1/train/2"):
    """Give this task cards, each as its type, or type and id; they are stored in `folder`.

    The files for what makes a card are in `folder/inputs`. The task is in its attempt 3.
    """
    names = ("flow_name", "run_id", "step_name", "task_id", "retry_count")
    for name, value in zip(names, (*task.split("/"), 3), strict=True):
        monkeypatch.setattr(current, f"_{name}", value)
    for each in (".metaflow", "inputs"):
        (folder / each).mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "inputs"))
    found = TaskCards(task.partition("/")[0], folder)
    for kind, _, name in (each.partition(" ") for each in kinds):
        found.add(kind, name or None)
    monkeypatch.setattr(type(current), "card", found.collector, raising=False)
    return found
