"""The log of a remote task is uploaded when there is bad news, and never gets in the way."""

import threading
from functools import partial

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import save_log
from metaflow_extensions.torchrun.plugins.torchrun.task import task_log
from metaflow_extensions.torchrun.plugins.torchrun.task.task_log import TaskLog


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(task_log, "_TEE_S", 0.0)


class Store:
    """A task datastore that keeps what it is given, when the test lets it go on."""

    def __init__(self):
        self.begun, self.saved, self.go_on = [], [], threading.Event()

    def get_task_datastore(self, *task, attempt, mode):
        return self

    def save_logs(self, source, files):
        self.begun.append(files["stdout"].read_text())
        assert self.go_on.wait(10)
        self.saved.append(self.begun[-1])


@pytest.fixture
def log(tmp_path):
    """Return a log whose file has a first line, and its store."""
    store, path = Store(), tmp_path / "stdout"
    path.write_text("first")
    upload = partial(save_log, store, ("1", "train", "2", 0))
    yield TaskLog(upload, {"MFLOG_STDOUT": str(path)}), store, path
    store.go_on.set()


def test_a_store_that_hangs_is_not_waited_for_and_the_newest_state_comes_last(log):
    """One upload waits for the one before, or an older state of the log could overwrite a newer."""
    log, store, path = log
    log.save()
    assert eventually(lambda: store.begun)
    path.write_text("second")
    log.save(wait_s=0.1)
    assert store.begun == ["first"]
    store.go_on.set()
    assert eventually(lambda: store.saved == ["first", "second"])
