"""How the workers of one node ended, and what they left that tells why."""

import json
import signal
import time
from datetime import datetime, timedelta

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import WorkerEnded
from metaflow_extensions.torchrun.plugins.torchrun.node.exits import (
    Exits,
    Record,
    read_agent_report,
    read_end,
    read_record,
    stderr_tail,
    worker_cause,
)

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 2, in main
    raise ValueError("loss is nan")
ValueError: loss is nan""".splitlines()


def test_torchs_rank_prefixes_are_taken_off(tmp_path):
    log = write(tmp_path / "stderr.log", "".join(f"[rank3]: {line}\n" for line in PLAIN))
    assert read_end(str(log)).splitlines() == PLAIN


def test_the_tail_of_a_huge_log_is_read_without_the_rest(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 1_000_000 + b"\nlast \xff line\n")
    text = read_end(str(log))
    assert text.endswith("\nlast \ufffd line")
    assert len(text) < 100_000


def test_a_missing_log_has_no_tail(tmp_path):
    assert stderr_tail(str(tmp_path / "none")) == ""


def elastic_error(message, trace="Traceback: here\n"):
    return json.dumps(
        {"message": {"message": message, "extraInfo": {"py_callstack": trace, "timestamp": "1763702515"}}}
    )


def own_record(at, exception="RuntimeError: recorded", trace="Traceback: ours\n"):
    return json.dumps({"exception": exception, "traceback": trace, "at": at})


@pytest.fixture
def leave(tmp_path):
    """Write files into a worker's folder, and return it."""

    def make(stderr=None, error=None, record=None):
        for name, text in (("stderr.log", stderr), ("error.json", error), ("exception.json", record)):
            if text is not None:
                write(tmp_path / name, text)
        return str(tmp_path)

    return make


def test_torchelastics_error_file_is_read(leave):
    before = time.monotonic()
    record = read_record(leave(error=elastic_error("ValueError: größe")))
    assert (record.exception, record.traceback) == ("ValueError: größe", "Traceback: here")
    assert before - 0.1 < record.at <= time.monotonic(), "when it was written"


def test_an_error_file_with_a_bare_message_is_read(leave):
    record = read_record(leave(error='{"message": "gone"}'))
    assert (record.exception, record.traceback) == ("gone", "gone")


def test_what_ended_the_worker_counts_more_than_what_was_recorded_before(leave):
    both = leave(error=elastic_error("ValueError: before"), record=own_record(7.5))
    assert read_record(both) == Record("RuntimeError: recorded", "Traceback: ours", 7.5)


BROKEN = [
    "",
    "{",
    '{"message": {"mess',
    "[]",
    "null",
    "3",
    "{}",
    '{"message": null}',
    '{"message": {}}',
    '{"message": 3}',
]


@pytest.mark.parametrize("text", [*BROKEN, '{"exception": 1, "traceback": 2, "at": 3}', '{"exception": "E", "at": 1}'])
def test_a_broken_record_counts_as_none(text, leave):
    assert read_record(leave(error=text)) is None
    assert read_record(leave(record=text)) is None
    assert read_record(leave(record=text, error=elastic_error("KeyError: 1"))).exception == "KeyError: 1"


def test_what_no_log_could_take_is_escaped(leave):
    assert read_record(leave(record=own_record(1, "E: \udcff", "🙂 \ud800"))) == Record("E: \\udcff", "🙂 \\ud800", 1.0)
    assert read_record(leave(error=elastic_error("E: \ud800"), record="")).exception == "E: \\ud800"


# --- a worker's end -> cause -----------------------------------------------------------------------


@pytest.fixture
def cause_of(leave):
    def make(exit_code, stopped=False, stopped_at=float("inf"), **files):
        found = worker_cause(WorkerEnded(5, 1, 0, exit_code, stopped, 0.0), 2, "host-2", leave(**files), stopped_at)
        return found and found[0]

    return make


def test_success_has_no_cause(cause_of):
    assert cause_of(0, stderr="\n".join(PLAIN), record=own_record(1.0)) is None


def test_an_exception_is_the_cause_since_it_was_raised(leave):
    end = WorkerEnded(5, 1, 0, 1, False, 0.0)
    expected = Cause("exception", 2, "host-2", 5, 1, 1, "RuntimeError: recorded", "Traceback: ours")
    assert worker_cause(end, 2, "host-2", leave(stderr="x", record=own_record(7.5)), 0.0) == (expected, 7.5)


@pytest.mark.parametrize("code", [3, -6, -11])
def test_what_ended_the_main_thread_is_the_cause_however_the_process_ended_after_it(code, cause_of):
    cause = cause_of(code, record=own_record(1.0))
    assert (cause.kind, cause.exit_code, cause.exception) == ("exception", code, "RuntimeError: recorded")


@pytest.mark.parametrize("code", [3, -9])
def test_a_traceback_on_stderr_is_shown_but_is_no_exception(code, cause_of):
    """It may be of a logger, a thread or a destructor."""
    cause = cause_of(code, stderr="\n".join(["before", *PLAIN, "[rank0]: after"]))
    assert (cause.kind, cause.exit_code, cause.exception) == ("exit" if code > 0 else "signal", code, None)
    assert cause.detail.splitlines() == ["before", *PLAIN, "after"]
    assert "Last lines of its stderr:\n  | before" in cause.describe()


def test_without_exception_the_end_of_stderr_is_shown(cause_of):
    cause = cause_of(3, stderr="".join(f"line {i}\n" for i in range(100)))
    assert cause.detail.splitlines() == [f"line {i}" for i in range(70, 100)]


def test_without_any_file_there_is_still_a_cause(cause_of):
    assert cause_of(3) == Cause("exit", 2, "host-2", 5, 1, 3)


def test_a_signal_is_the_cause(cause_of):
    cause = cause_of(-9, stderr="loading\n")
    assert (cause.kind, cause.exit_code, cause.detail) == ("signal", -9, "loading")
    assert "Rank 5 on node 2 (host host-2) was killed by SIGKILL" in cause.describe()


@pytest.mark.parametrize("code", [-15, -9, -6, 1, 143])
@pytest.mark.parametrize("record", [None, own_record(7.5)])
def test_a_worker_that_obeyed_is_no_cause_whatever_it_raised_then(code, record, cause_of):
    assert cause_of(code, stopped=True, stopped_at=7.0, stderr="\n".join(PLAIN), record=record) is None


@pytest.mark.parametrize(("code", "shown"), [(-15, None), (1, 1)])
def test_a_worker_that_was_failing_before_we_stopped_it_is_a_cause(code, shown, cause_of):
    cause = cause_of(code, stopped=True, stopped_at=8.0, record=own_record(7.5))
    assert (cause.kind, cause.exit_code, cause.exception) == ("exception", shown, "RuntimeError: recorded")


# --- torchrun's own report -------------------------------------------------------------------------

REPORT = """\
E1121 05:21:55.123000 42 torch/distributed/elastic/api.py:984] failed (exitcode: 3) local_rank: 1 (pid: 77) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/flow/it's a train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-11-21_05:21:54
  host      : node-1
  rank      : 6 (local_rank: 2)
  exitcode  : -9 (pid: 78)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 78
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-21_05:21:54
  host      : node-1
  rank      : 5 (local_rank: 1)
  exitcode  : 3 (pid: 77)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


GOT_SIGNAL = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"


@pytest.mark.parametrize(
    ("text", "exit_codes", "got_signal"),
    [
        (REPORT, {1: 3, 2: -9}, None),
        (GOT_SIGNAL, {}, 15),
        ("", {}, None),
        ("ModuleNotFoundError: No module named 'torch'\n", {}, None),
        (REPORT[:300], {}, None),
    ],
)
def test_torchruns_report_names_every_failed_worker_and_the_signal_it_got(text, exit_codes, got_signal, tmp_path):
    write(tmp_path / "agent.stderr", text)
    report = read_agent_report(str(tmp_path))
    assert (report.exit_codes, report.got_signal) == (exit_codes, got_signal)


# --- which ends of one node's workers count as failures, and since when ------------------------------

TERMINATED = -signal.SIGTERM


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


class Node:
    """The second node of a gang, whose ranks are 3, 4 and 5; its clock's origin was a minute ago."""

    def __init__(self, folder):
        self.folder = folder
        self.origin = time.monotonic() - 60
        self.agent_stderr = write(folder / "agent.stderr", "")
        self.exits = Exits(str(folder), first_rank=3)
        self.stopped_at = float("inf")

    def raised(self, local_rank, exception, at):
        record = {"exception": exception, "traceback": f"Traceback\n{exception}", "at": self.origin + at}
        write(self.folder / "run_x" / "attempt_0" / str(local_rank) / "exception.json", json.dumps(record))

    def ended(self, local_rank, status, at, stopped=False):
        self.exits.note(WorkerEnded(3 + local_rank, local_rank, 100 + local_rank, status, stopped, self.origin + at))

    def reaped(self, local_rank, at):
        self.ended(local_rank, None, at, stopped=True)

    def stop(self, at):
        self.stopped_at = self.origin + at

    def torchrun_stops(self, *local_ranks, at=None):
        """Have torchrun say that it stops some; its clock may be of another zone."""
        when = datetime.now() - timedelta(hours=1 if at is None else 0, seconds=60 - (at or 0))
        head = f"W{when:%m%d %H:%M:%S.%f} 77 torch/api.py:1] Sending process"
        lines = [f"{head} {100 + rank} closing signal SIGTERM" for rank in local_ranks]
        write(self.agent_stderr, "\n".join(lines))

    def causes(self):
        """Return rank, exception and moment of each failure, the earliest first."""
        found = self.exits.causes(1, "host-1", self.stopped_at)
        return [(cause.rank, cause.exception, round(at - self.origin, 1)) for at, cause in found]


def test_what_a_stopped_rank_raised_then_does_not_hide_the_rank_that_failed(node):
    """It obeyed, in its own way; that its peer's connection broke is the only cause there is."""
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.ended(0, 1, at=1.5)
    node.stop(at=1.6)
    node.raised(1, "RuntimeError: interrupted while saving", at=1.7)
    node.ended(1, 1, at=1.8, stopped=True)
    node.raised(2, "OSError: bye", at=1.9)
    node.ended(2, TERMINATED, at=1.9, stopped=True)
    assert node.causes() == [(3, "ConnectionResetError: by peer", 1.0)]


def test_a_rank_that_failed_before_it_was_stopped_counts_since_it_failed(node):
    """The origin was slow to exit; its peer, which only saw it gone, was first to end."""
    node.raised(0, "ValueError: nan", at=1.0)
    node.raised(1, "ConnectionResetError: by peer", at=1.2)
    node.ended(1, 1, at=1.3)
    node.stop(at=1.4)
    node.ended(0, TERMINATED, at=2.0, stopped=True)
    assert node.causes() == [(3, "ValueError: nan", 1.0), (4, "ConnectionResetError: by peer", 1.2)]


def test_an_end_without_record_counts_when_it_came(node):
    node.ended(0, -9, at=1.0)
    node.raised(1, "KeyError: 1", at=0.5)
    node.ended(1, 1, at=2.0)
    assert node.causes() == [(4, "KeyError: 1", 0.5), (3, None, 1.0)]


def test_torchruns_own_signal_is_no_cause_and_comes_after_the_first_failure(node):
    node.torchrun_stops(1, 2)
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.ended(0, 1, at=1.1)
    node.raised(1, "RuntimeError: told to stop", at=1.3)
    node.ended(1, 1, at=1.4)
    node.raised(2, "ValueError: nan", at=0.9)
    node.ended(2, TERMINATED, at=1.4)
    assert node.causes() == [(5, "ValueError: nan", 0.9), (3, "ConnectionResetError: by peer", 1.0)]


def test_torchrun_may_have_seen_a_failure_long_before_we_did(node):
    """On a busy machine."""
    node.raised(0, "RuntimeError: told to stop", at=1.3)
    node.torchrun_stops(0, at=1.2)
    node.ended(1, -9, at=2.0)
    node.ended(0, 1, at=2.0)
    assert node.causes() == [(4, None, 2.0)]


def test_a_failure_that_torchrun_alone_has_seen_ends_what_others_can_have_failed_of(node):
    node.torchrun_stops(1)
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.reaped(0, at=1.1)
    node.raised(1, "RuntimeError: told to stop", at=1.3)
    node.ended(1, 1, at=1.4)
    assert node.exits.failed_unseen().local_rank == 0
    assert node.causes() == [(3, "ConnectionResetError: by peer", 1.0)]


@pytest.mark.parametrize("code", [-15, -9, 143])
def test_a_gang_that_was_stopped_has_no_cause_of_its_own(node, code):
    node.stop(at=1.0)
    for local_rank in range(3):
        node.ended(local_rank, code, at=1.2, stopped=True)
    assert node.causes() == []
