"""`metaflow_torchrun.report`: what a script writes with it, in a launch and elsewhere."""

import json
import math
import os
import subprocess
import sys
import warnings

import pytest
from metaflow_torchrun import report
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.supervisor.progress_observer import LineReader


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Return a function that returns the new lines, as a node reads them."""
    path = tmp_path / "größe 🙂.jsonl"
    monkeypatch.setenv("TORCHRUN_METRICS", str(path))
    return LineReader(str(path)).new_lines


class Scalar:
    """A number of another library's kind, as a tensor of one element."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        if self.value is None:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return float(self.value)


class Tensor(Scalar):
    """One that is part of a graph warns when it becomes a float by itself (torch 2.13)."""

    def item(self):
        return self.value

    def __float__(self):
        raise AssertionError


def test_a_node_reads_what_is_reported(lines):
    report(step=3, total=100, seconds=0.5, loss=Scalar(0.25), lr=None)
    report(4, 100, **{"val/loss 🙂": 2})
    report(Scalar(5), loss=math.nan)
    report(Tensor(7), loss=Tensor(0.5))
    first, second, third, fourth = lines()
    assert (first.step, first.total, first.seconds, first.values) == (3, 100, 0.5, {"loss": 0.25})
    assert (second.step, second.values) == (4, {"val/loss 🙂": 2.0})
    assert (third.step, third.values) == (5, {"loss": None})
    assert (fourth.step, fourth.values) == (7, {"loss": 0.5})


def test_an_int_of_any_size_ends_no_training(lines):
    report(step=2**53, loss=2**60)
    with pytest.warns(RuntimeWarning, match="leaves 'loss' out"):
        report(step=1, loss=10**5000)  # Python writes no int with so many digits
    first, second = lines()
    assert (first.step, first.values, second.step, second.values) == (2**53, {"loss": 2.0**60}, 1, {})


def test_outside_of_a_launch_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHRUN_METRICS", raising=False)
    monkeypatch.chdir(tmp_path)
    report(step=3, loss="no number")
    assert list(tmp_path.iterdir()) == []


def test_no_value_and_no_disk_ends_the_training(lines, monkeypatch, tmp_path, capsys):
    with pytest.warns(RuntimeWarning, match="leaves 'loss' out, since it is no number: .*2 elements") as seen:
        report(step=1, loss=Scalar(None), accuracy=0.5)
    assert seen[0].filename == __file__, "the warning names the user's line"
    (line,) = lines()
    assert (line.step, line.values) == (1, {"accuracy": 0.5})
    monkeypatch.setenv("TORCHRUN_METRICS", str(tmp_path / "gone" / "0.jsonl"))
    with pytest.warns(RuntimeWarning, match="could not write"):
        report(step=2)
    with warnings.catch_warnings(record=True) as again:
        for _ in range(100):
            report(step=2)
    assert len(again) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(step=2)
    assert "could not write" in capsys.readouterr().err


def test_forks_and_threads_write_whole_lines(lines, tmp_path):
    script = """
        import os, threading
        from metaflow_torchrun import report

        def many(value):
            for step in range(300):
                report(step, **{"a long name " * 5: value})

        children = [os.fork() for _ in range(2)]  # four processes
        threads = [threading.Thread(target=many, args=(value,)) for value in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        [os.waitpid(child, 0) for child in children if child]
    """
    path = write(tmp_path / "work.py", "\n".join(line[8:] for line in script.splitlines()))
    subprocess.run([sys.executable, path], check=True, timeout=60)
    file = os.environ["TORCHRUN_METRICS"]
    with open(file, encoding="utf-8") as written:
        assert len([json.loads(line) for line in written]) == 4 * 2 * 300
    assert len(lines()) == 4 * 2 * 300
