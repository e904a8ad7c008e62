"""The log of a remote task is uploaded when there is bad news, and never gets in the way."""

import threading
import time
from functools import partial

import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import save_log
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.task import task_log
from metaflow_extensions.torchrun.plugins.torchrun.task.task_log import TaskLog


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(task_log, "_TEE_S", 0.0)


class Store:
    """A task datastore that keeps what it is given, when the test lets it go on."""

    def __init__(self, open_now=True):
        self.begun, self.saved, self.go_on = [], [], threading.Event()
        if open_now:
            self.go_on.set()

    def get_task_datastore(self, *task, attempt, mode):
        return self

    def save_logs(self, source, data):
        self.begun.append(data)
        assert self.go_on.wait(10)
        self.saved.append((source, data))


def log_of(tmp_path, store, **files):
    env = {}
    for stream, text in files.items():
        path = tmp_path / stream
        path.write_text(text)
        env[f"MFLOG_{stream.upper()}"] = str(path)
    return TaskLog(partial(save_log, store, ("1", "train", "2", 0)), env)


def test_only_bad_news_is_urgent(tmp_path, capfd):
    store = Store()
    log = log_of(tmp_path, store, stdout="x")
    before = threading.active_count()
    log.take(Event("note", 0, "all well"), 2)
    assert threading.active_count() == before
    log.take(Event("failed", 0, "Rank 3 failed"), 2)
    assert eventually(lambda: store.saved)
    assert capfd.readouterr().err == "[torchrun node 0] all well\n[torchrun node 0] Rank 3 failed\n"


def test_a_store_that_fails_or_hangs_is_not_waited_for(tmp_path):
    log_of(tmp_path, None, stdout="x").save(wait_s=5)
    store = Store(open_now=False)
    begin = time.monotonic()
    log_of(tmp_path, store, stdout="x").save(wait_s=0.01)
    assert time.monotonic() - begin < 2
    store.go_on.set()


def test_the_newest_state_comes_last(tmp_path):
    """One upload waits for the one before, or an older state of the log could overwrite a newer."""
    store = Store(open_now=False)
    log = log_of(tmp_path, store, stdout="first")
    log.save()
    assert eventually(lambda: store.begun)
    (tmp_path / "stdout").write_text("second")
    log.save(wait_s=0.1)
    assert store.begun == [{"stdout": b"first"}]
    store.go_on.set()
    assert eventually(lambda: [data["stdout"] for _, data in store.saved] == [b"first", b"second"])
