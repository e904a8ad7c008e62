"""A spot notice is seen once, when it comes."""

import time

from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import preemption
from metaflow_extensions.torchrun.plugins.torchrun.preemption import watch_spot_notice


def test_a_notice_is_passed_on_once(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_LOOK_S", 0.02)
    path, seen = tmp_path / "notice", []
    over = watch_spot_notice(str(path), seen.append)
    time.sleep(0.1)
    assert seen == []
    path.write_text("2026-11-21T10:00:00Z\n")
    assert eventually(lambda: seen)
    time.sleep(0.1)
    assert seen == ["2026-11-21T10:00:00Z"]
    over.set()


def test_nothing_is_seen_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_LOOK_S", 0.02)
    path, seen = tmp_path / "notice", []
    watch_spot_notice(str(path), seen.append).set()
    time.sleep(0.05)
    path.touch()
    time.sleep(0.1)
    assert seen == []
