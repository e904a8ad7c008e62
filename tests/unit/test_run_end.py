"""What the process of a run says last when a gang has failed; the datastore is Metaflow's own, on this disk."""

import json
from types import SimpleNamespace

from gang_views import Story
from metaflow.datastore import FlowDataStore
from metaflow.exception import MetaflowException
from metaflow.plugins.datastores.local_storage import LocalStorage
from metaflow.runtime import TaskFailed

from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.show.stored_gangs import last_lines

SHOW = "[torchrun] To see what happened on all nodes: python '/a folder/my flow.py' torchrun show 7"


def test_the_command_that_shows_the_gang_is_the_last_line_whatever_the_datastore_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a folder/my flow.py", "run"])
    datastore = FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path))
    datastore.get_task_datastore("7", "train", "3", attempt=0, mode="w").init_task()
    left = Story().running().at(8.0).crashed().left(how="failed")
    Registry(datastore, "7", "train", "3", 0).save_view(left.view)

    def told(step="train", is_only_gang=True, error=None):
        error = error or TaskFailed(SimpleNamespace(step=step, task_id="3"))
        return last_lines(datastore, "7", "train", is_only_gang, False, error).splitlines()

    assert told() == [SHOW]
    assert told(is_only_gang=False) == [f"{SHOW}/train"]
    assert told(error=KeyboardInterrupt()) == [SHOW]
    assert told(step="join") == told(step="train2") == told(error=MetaflowException("Step *train* failed")) == []
    (path,) = tmp_path.rglob("*torchrun_view.json")
    path.write_text(json.dumps({"version": 2, "events": ["torn"]}))
    assert told() == [SHOW]
