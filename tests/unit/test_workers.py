"""How the workers of one node ended, and what they left that tells why."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from unit_helpers import Patient, write

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, FailureText
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import WorkerEnded
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.workers import (
    Workers,
    read_record,
)

PLAIN = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: loss is nan"]
BAR = "\n 10 %|#  |\r 30 %|###|\n[rank1]: mine\r\n\n"
TERMINATED = -signal.SIGTERM


def own_record(at, exception="RuntimeError: recorded", trace="Traceback: ours\n"):
    return json.dumps({"exception": exception, "traceback": trace, "at": at, "advice": ""})


class Node:
    """The second node of a gang, whose ranks are 3, 4 and 5; its clock's origin was a minute ago."""

    def __init__(self, folder, **fields):
        self.folder = folder
        self.origin = time.monotonic() - 60
        call = Call("train.py", (), False, nproc=3, num_nodes=2, node_index=1, python="python3", **fields)
        self.written = {}  # (local rank or agent, stream) -> text
        logs = SimpleNamespace(tail=lambda *which: self.written.get(which, ""))
        self.exits = Workers(call, None, SimpleNamespace(host="host-1"), str(folder), logs, None)
        self.exits.files = Patient()
        self.stopped_at = float("inf")

    def leaves(self, local_rank=0, stderr=None, record=None, stdout=None):
        """Write what a worker leaves; return its folder."""
        folder = self.folder / "run_x" / "attempt_0" / str(local_rank)
        for stream, text in (("stdout", stdout), ("stderr", stderr)):
            self.written[local_rank, stream] = text or ""
        if record is not None:
            write(folder / "exception.json", record)
        return str(folder)

    def raised(self, local_rank, exception, at):
        self.leaves(local_rank, record=own_record(self.origin + at, exception))

    def ended(self, local_rank, status, at=1.0, stopped=False, stopped_at=None):
        told_at = None if stopped_at is None else self.origin + stopped_at
        who = (3 + local_rank, local_rank, 100 + local_rank)
        self.exits.record(WorkerEnded(*who, status, stopped or told_at is not None, self.origin + at, told_at))

    def stop(self, at):
        self.stopped_at = self.origin + at

    def causes(self):
        """Return rank, exception and moment of each failure, the earliest first."""
        found = self.exits.causes(self.stopped_at)
        return [(cause.rank, cause.exception, round(at - self.origin, 1)) for at, cause in found]

    def cause(self):
        """Return the only cause, or None."""
        found = self.exits.causes(self.stopped_at)
        assert len(found) <= 1
        return found[0][1] if found else None


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


REFUSES = "import argparse as a; p = a.ArgumentParser(); p.add_argument('--amp', action='store_true'); p.parse_args()"


@pytest.mark.parametrize("bools", [(("amp", True),), ()], ids=["True", "a text"])
def test_a_script_that_refuses_true_for_a_flag_has_the_remedy_beside_its_own_words(bools, tmp_path):
    """`bools` are the arguments that were given as True or False; see `test_make_call`."""
    node = Node(tmp_path, bools=bools)
    done = subprocess.run([sys.executable, "-c", REFUSES, "--amp", "true"], stderr=subprocess.PIPE, text=True)
    node.leaves(stderr=done.stderr)
    node.ended(0, done.returncode)
    told = node.cause().describe()
    assert "error: unrecognized arguments: true" in told
    assert ("{'amp': None}" in told) is bool(bools)


# --- what a worker leaves --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", '{"message": {"mess', "[]", '{"exception": "E", "at": 1}'])
def test_a_broken_record_counts_as_none(text, node):
    assert read_record(node.leaves(record=text)) is None


@pytest.mark.parametrize("code", [1, -11])
def test_what_ended_the_main_thread_is_the_cause_however_the_process_ended_after_it(code, node):
    node.leaves(0, stderr="x", record=own_record(node.origin + 0.5))
    node.ended(0, code)
    node.leaves(1, stderr="\n".join(PLAIN), record=own_record(1.0))
    node.ended(1, 0)
    assert node.cause() == Cause("exception", 1, "host-1", 3, 0, code, "RuntimeError: recorded", "Traceback: ours")
    assert node.causes()[0][2] == 0.5, "since it was raised"


@pytest.mark.parametrize("code", [3, -9])
def test_a_traceback_on_stderr_is_shown_but_is_no_exception(code, node):
    """It may be of a logger, a thread or a destructor."""
    lines = [*(f"line {i}" for i in range(100)), *PLAIN, "[rank0]: after"]
    node.leaves(0, stderr="\n".join(lines), stdout="\n".join(map(str, range(99))) + BAR)
    node.ended(0, code)
    cause = node.cause()
    assert (cause.kind, cause.exit_code, cause.exception) == ("exit" if code > 0 else "signal", code, None)
    assert cause.detail.splitlines() == [*lines[-30:-1], "after"]
    assert cause.stdout.splitlines() == [*map(str, range(91, 99)), " 30 %|###|", "[rank1]: mine"], "as in a terminal"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_worker_that_obeyed_is_no_cause_whatever_it_raised_then(is_recorded, node):
    node.stop(at=1.0)
    node.leaves(0, stderr="\n".join(PLAIN), record=own_record(node.origin + 1.5) if is_recorded else None)
    node.ended(0, 1, 2.0, stopped=True)
    assert node.cause() is None


# --- which ends of one node's workers count as failures, and since when ------------------------------


def test_a_rank_that_failed_before_it_was_stopped_counts_since_it_failed(node):
    """The origin was slow to exit; its peer, which only saw it gone, was first to end."""
    node.raised(0, "ValueError: nan", at=1.0)
    node.raised(1, "ConnectionResetError: by peer", at=1.2)
    node.ended(1, 1, at=1.3)
    node.ended(2, -9, at=1.1)  # without a record it counts when it came
    node.stop(at=1.4)
    node.ended(0, TERMINATED, at=2.0, stopped=True)
    assert node.causes() == [(3, "ValueError: nan", 1.0), (5, None, 1.1), (4, "ConnectionResetError: by peer", 1.2)]


def test_torchruns_own_signal_is_no_cause_and_comes_after_the_first_failure(node):
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.ended(0, 1, at=1.1)
    node.raised(1, "RuntimeError: told to stop", at=1.3)
    node.ended(1, 1, at=1.4, stopped_at=1.2)
    node.raised(2, "ValueError: nan", at=0.9)
    node.ended(2, TERMINATED, at=1.4, stopped_at=1.2)
    assert node.causes() == [(5, "ValueError: nan", 0.9), (3, "ConnectionResetError: by peer", 1.0)]


# --- where it was, and what a script said last ----------------------------------------------------

FRAMES = """  File "/home/me/größe/train.py", line 7, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "<frozen runpy>", line 88, in _run_code
  File "/clone/metaflow_extensions/torchrun/plugins/torchrun/worker/function_worker.py", line 51, in main
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
"""


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (f"Traceback (most recent call last):\n{FRAMES}ValueError: no", "failed at train.py:7 with ValueError: no"),
        (
            f"Traceback (most recent call last):\n{FRAMES}KeyError: 1\n\nDuring handling of the above exception, another "
            "exception occurred:\n\nTraceback (most recent call last):\n"
            '  File "/home/me/other.py", line 3, in f\nValueError: no',
            "failed at other.py:3 with ValueError: no",
        ),
        ("", "failed with ValueError: no"),
        (
            "  + Exception Group Traceback (most recent call last):\n  |"
            + '   File "/home/me/train.py", line 22, in <module>\n  |   raise ExceptionGroup\n  | ExceptionGroup: 1\n'
            "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
            '    |   File "/home/me/inner.py", line 3, in f\n    | KeyError: 1\n',
            "failed at train.py:22 with ValueError: no",
        ),
    ],
)
def test_a_failure_names_file_and_line_of_the_users_code(trace, said, node):
    node.leaves(record=own_record(node.origin + 1, "ValueError: no", trace))
    node.ended(0, 1, at=2)
    cause = node.cause()
    assert cause.what == said
    assert f"{said}." in FailureText(cause).without_detail(), "also where the traceback is not repeated"
