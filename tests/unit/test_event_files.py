"""TensorBoard's event files are read by a real process, with TensorBoard's own reader."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fake_node import FakeNode
from unit_helpers import OURS, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Point
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended
from metaflow_extensions.torchrun.plugins.torchrun.node import event_files
from metaflow_extensions.torchrun.plugins.torchrun.node.event_files import EventFiles


def write_scalars(path, *scalars):
    """Append events with (step, tag, value), as TensorBoard writes them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    os.makedirs(path.parent, exist_ok=True)
    with open(path, "ab") as file:
        writer = RecordWriter(file)
        for step, tag, value in scalars:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())


@pytest.fixture
def read(tmp_path):
    """Read event files in a folder of the test's as a launch does; return what was read so far."""
    spec = SimpleNamespace(tensorboard=str(tmp_path / "rüns"), node_index=0, python=sys.executable, cwd=None)
    files = EventFiles(spec, str(tmp_path / "lines.jsonl"))

    def lines():
        text = (tmp_path / "lines.jsonl").read_text() if (tmp_path / "lines.jsonl").exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    yield SimpleNamespace(files=files, lines=lines, folder=tmp_path / "rüns", lines_file=tmp_path / "lines.jsonl")
    files.close()


def test_scalars_become_lines_while_they_are_written_and_to_the_end(read):
    old = read.folder / "events.out.tfevents.0.old"
    write_scalars(old, (1, "of another launch", 2.0))
    os.utime(old, (1, 1))
    write(read.folder / "events.out.tfevents.1.damaged", "no event file")
    write(read.folder / "notes.txt", "no event file")
    read.files.start()
    process = read.files._process
    here, below = read.folder / "events.out.tfevents.2.größe", read.folder / "loss_val" / "events.out.tfevents.3.x"
    write_scalars(here, (1, "loss/train", 2.0), (1, "lr", 0.5), (2, "loss/train", 1.0))
    eventually(lambda: len(read.lines()) == 2, deadline_s=30)
    assert read.lines() == [{"loss/train": 2.0, "lr": 0.5, "step": 1}, {"loss/train": 1.0, "step": 2}]
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    write_scalars(here, (3, "loss/train", float("nan")))
    write_scalars(below, (3, "loss", 4.0))
    read.files.close()
    assert not is_running(process.pid)
    third, fourth = read.lines()[2:]
    assert third["loss/train"] != third["loss/train"], "it is not a number"
    assert fourth == {"loss_val/loss": 4.0, "step": 3}
    assert read.files.take_complaint() is None


def test_it_does_not_import_tensorflow(read, tmp_path, monkeypatch):
    write(tmp_path / "modules" / "tensorflow.py", "raise SystemExit('tensorflow was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    write_scalars(read.folder / "events.out.tfevents.2.x", (1, "loss", 2.0))
    read.files.start()
    eventually(read.lines, deadline_s=30)
    assert read.files.take_complaint() is None


def test_that_it_has_failed_is_said_once(read, monkeypatch, tmp_path):
    write(tmp_path / "modules" / "tensorboard" / "__init__.py", "raise OSError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    read.files.start()
    complaint = eventually(read.files.take_complaint)
    assert complaint == "warning: run(tensorboard=...) reads nothing any more: OSError: a broken installation"
    assert read.files.take_complaint() is None


def test_it_ends_with_the_task_that_is_killed(tmp_path):
    code = f"""{OURS}
from types import SimpleNamespace
from ours.node.event_files import EventFiles
files = EventFiles(SimpleNamespace(tensorboard="runs", node_index=0, python=sys.executable, cwd=None), "lines")
files.start()
print(files._process.pid, flush=True)
sys.stdin.read()
"""
    task = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    pid = int(task.stdout.readline())
    os.kill(task.pid, signal.SIGKILL)
    task.communicate()
    eventually(lambda: not is_running(pid), deadline_s=30)


@pytest.mark.parametrize("more", [{"tensorboard": None}, {"node_index": 1}])
def test_no_process_is_started_where_nothing_is_to_be_read(more, tmp_path):
    facts = {"tensorboard": str(tmp_path), "node_index": 0, "python": sys.executable, "cwd": None, **more}
    files = EventFiles(SimpleNamespace(**facts), str(tmp_path / "lines"))
    files.start()
    assert files._process is None
    files.close()


def test_what_is_in_event_files_at_the_end_of_a_launch_is_told_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(
        event_files, "_LAST_S", 60.0
    )  # on a busy machine the import of TensorBoard takes longer than 5 s
    node = FakeNode(tmp_path / "logs", spec={"tensorboard": str(tmp_path / "runs"), "python": sys.executable})
    agent = node.running()
    write_scalars(tmp_path / "runs" / "events.out.tfevents.2.x", (7, "loss", 2.0))
    node.all_end_well(agent)
    message = node.next_message()
    while not isinstance(message, Ended):
        last, message = message, node.next_message()
    assert last.points == (Point(7, {"loss": 2.0}),)
    node.verdict()
