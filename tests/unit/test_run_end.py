"""What the process of a run says last when a gang has failed; the datastore is Metaflow's own, on this disk."""

import json
from types import SimpleNamespace

import pytest
from gang_views import Story
from metaflow.datastore import FlowDataStore
from metaflow.exception import MetaflowException
from metaflow.plugins.datastores.local_storage import LocalStorage
from metaflow.runtime import TaskFailed

from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_gangs import last_lines

RUNNING = Story().running()
LEFT = Story().running().at(8.0).crashed().left(how="failed")


@pytest.fixture
def datastore(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a folder/my flow.py", "run"])
    return FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path))


def begun(datastore, story=None, runtime=None, task="3"):
    """Leave what the control task of attempt 0 leaves, and what Metaflow does that has seen its end."""
    store = datastore.get_task_datastore("7", "train", task, attempt=0, mode="w")
    store.init_task()
    if story is not None:
        Registry(datastore, "7", "train", task, 0).save_view(story.view, 1.0)
    if runtime is not None:
        store.save_metadata({"runtime": runtime})


def told(datastore, step="train", task="3", is_only_gang=True, is_remote=False):
    error = TaskFailed(SimpleNamespace(step=step, task_id=task))
    return last_lines(datastore, "7", "train", is_only_gang, is_remote, error).splitlines()


SHOW = "[torchrun] To see what happened on all nodes: python '/a folder/my flow.py' torchrun show 7"


def test_the_command_that_shows_the_gang_is_the_last_line(datastore):
    begun(datastore, LEFT)
    assert told(datastore) == [SHOW]
    assert told(datastore, is_only_gang=False) == [f"{SHOW}/train"]
    assert told(datastore, step="join") == []
    assert told(datastore, step="train2") == []
    assert last_lines(datastore, "7", "train", True, False, MetaflowException("Step *train* failed")) == ""


def test_whatever_the_datastore_raises_the_command_is_named(datastore, tmp_path):
    begun(datastore, RUNNING)
    (path,) = tmp_path.rglob("*torchrun_view.json")
    path.write_text(json.dumps({"version": 2, "events": [None]}))
    assert told(datastore) == [SHOW]
