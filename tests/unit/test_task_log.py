"""The log of a remote task is uploaded when there is bad news, and never gets in the way."""

import threading
import time

from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import task_log
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.task_log import TaskLog


class Store:
    """A task datastore that keeps what it is given, as slowly as the test wants."""

    def __init__(self, takes_s=0.0, error=None):
        self.saved, self.takes_s, self.error = [], takes_s, error

    def __call__(self):
        return self

    def save_logs(self, source, data):
        time.sleep(self.takes_s)
        if self.error:
            raise self.error
        self.saved.append((source, data))


def log_of(tmp_path, store, **files):
    env = {}
    for stream, text in files.items():
        path = tmp_path / stream
        path.write_text(text)
        env[f"MFLOG_{stream.upper()}"] = str(path)
    return TaskLog(store, env)


def test_both_streams_are_saved_as_the_tasks_own(tmp_path):
    store = Store()
    log_of(tmp_path, store, stdout="out\n", stderr="err\n").save(wait_s=5)
    assert store.saved == [("task", {"stdout": b"out\n", "stderr": b"err\n"})]


def test_large_logs_are_left_to_the_datastore(tmp_path, monkeypatch):
    monkeypatch.setattr(task_log, "_SMALL_BYTES", 3)
    store = Store()
    log_of(tmp_path, store, stdout="too large").save(wait_s=5)
    assert store.saved == [("task", {"stdout": tmp_path / "stdout"})]


def test_only_bad_news_is_urgent(tmp_path):
    store, seen = Store(), []
    take = log_of(tmp_path, store, stdout="x").after(seen.append)
    take(Event("note", 0, "all well"))
    take(Event("stopping", 0, ""))
    time.sleep(0.5)
    assert store.saved == []
    take(Event("failed", 0, "Rank 3 failed"))
    assert eventually(lambda: store.saved)
    assert [event.kind for event in seen] == ["note", "stopping", "failed"]


def test_a_store_that_fails_or_hangs_is_not_waited_for(tmp_path):
    log_of(tmp_path, Store(error=OSError("no network")), stdout="x").save(wait_s=5)
    begin = time.monotonic()
    log_of(tmp_path, Store(takes_s=3), stdout="x").save(wait_s=0.1)
    assert time.monotonic() - begin < 2


def test_the_newest_state_comes_last(tmp_path, monkeypatch):
    """One upload waits for the one before, or an older state of the log could overwrite a newer."""
    monkeypatch.setattr(task_log, "_TEE_S", 0.0)
    begun, go_on = [], threading.Event()

    class Slow(Store):
        def save_logs(self, source, data):
            begun.append(data["stdout"])
            assert go_on.wait(10)
            super().save_logs(source, data)

    store = Slow()
    log = log_of(tmp_path, store, stdout="first")
    log.save()
    assert eventually(lambda: begun)
    (tmp_path / "stdout").write_text("second")
    log.save(wait_s=0.3)
    assert begun == [b"first"]
    go_on.set()
    assert eventually(lambda: [data["stdout"] for _, data in store.saved] == [b"first", b"second"])


def test_without_files_nothing_happens():
    store = Store()
    before = threading.active_count()
    TaskLog(store, {}).save(wait_s=5)
    assert threading.active_count() == before
    assert store.saved == []
