"""From what a failed worker left behind to a cause that can be named."""

import json
import signal
import time

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.failure import (
    Cause,
    DatedCause,
    Record,
    WorkerEnd,
    describe_exit,
    ends_reported_by_agent,
    first_cause,
    first_reported,
    read_record,
    read_tail,
    signal_name,
    worker_cause,
)
from metaflow_extensions.torchrun.plugins.torchrun.frames import MAX_FRAME_BYTES
from metaflow_extensions.torchrun.plugins.torchrun.memory import describe_oom

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 2, in main
    raise ValueError("loss is nan")
ValueError: loss is nan""".splitlines()

# --- exit statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "exited with code 1"),
        (0, "exited with code 0"),
        (-9, "was killed by SIGKILL: often the out-of-memory killer"),
        (-11, "was killed by SIGSEGV"),
        (-6, "was killed by SIGABRT"),
        (-7, "was killed by SIGBUS: often a full /dev/shm"),
        (-15, "was killed by SIGTERM"),
        (-10, "was killed by SIGUSR1"),
        (-99, "was killed by signal 99"),
    ],
)
def test_an_exit_code_is_explained(code, said):
    assert describe_exit(code).startswith(said)


def test_a_signal_has_a_name():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(4242) == "signal 4242"


def test_torchs_rank_prefixes_are_taken_off(tmp_path):
    log = write(tmp_path / "stderr.log", "".join(f"[rank3]: {line}\n" for line in PLAIN))
    assert read_tail(str(log)) == PLAIN


# --- files ---------------------------------------------------------------------------------------


def test_the_tail_of_a_huge_log_is_read_without_the_rest(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 1_000_000 + b"\nlast \xff line\n")
    lines = read_tail(str(log))
    assert lines[-1] == "last \ufffd line"
    assert sum(map(len, lines)) < 100_000


def test_a_missing_log_has_no_tail(tmp_path):
    assert read_tail(str(tmp_path / "none")) == []


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
        found = worker_cause(WorkerEnd(1, 5, exit_code, stopped, 0.0), 2, "host-2", leave(**files), stopped_at)
        return found and found[0]

    return make


def test_success_has_no_cause(cause_of):
    assert cause_of(0, stderr="\n".join(PLAIN), record=own_record(1.0)) is None


def test_an_exception_is_the_cause_since_it_was_raised(leave):
    end = WorkerEnd(1, 5, 1, False, 0.0)
    expected = Cause("exception", 2, "host-2", 5, 1, 1, "RuntimeError: recorded", "Traceback: ours")
    assert worker_cause(end, 2, "host-2", leave(stderr="x", record=own_record(7.5))) == (expected, 7.5)


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


def test_torchruns_report_names_every_failed_worker(tmp_path):
    assert ends_reported_by_agent(str(write(tmp_path / "agent.stderr", REPORT))) == {1: 3, 2: -9}


@pytest.mark.parametrize("text", ["", "ModuleNotFoundError: No module named 'torch'\n", REPORT[:300]])
def test_without_report_no_worker_is_accused(text, tmp_path):
    assert ends_reported_by_agent(str(write(tmp_path / "agent.stderr", text))) == {}


# --- which came first ------------------------------------------------------------------------------


def failed(rank, exception=None, code=1, kind="exception", detail=""):
    return Cause(kind, rank, f"host-{rank}", rank, 0, code, exception, detail)


ORIGIN = failed(1, "ValueError: loss is nan")


def test_no_failure_has_no_cause():
    assert first_cause([]) is None


def test_the_earliest_failure_is_the_cause():
    assert first_cause([DatedCause(2.0, failed(0, "KeyError: 1")), DatedCause(1.0, ORIGIN)]) is ORIGIN


@pytest.mark.parametrize(
    "consequence",
    [
        failed(0, "RuntimeError: [../third_party/gloo/pair.cc:525] Connection closed by peer [10.0.0.7]:4242"),
        failed(0, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, ncclRemoteError"),
        failed(0, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        failed(0, "BrokenPipeError: [Errno 32] Broken pipe"),
        failed(0, "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"),
        failed(0, "torch.distributed.DistStoreError: Timed out after 300 seconds waiting for clients"),
        failed(0, None, 1, "exit", "[E] Watchdog caught collective operation timeout: WorkNCCL"),
        failed(0, None, -15, "signal"),
        failed(0, None, -2, "signal"),
        Cause("agent", 0, "host-0", exit_code=1, exception="its torchrun agent exited with code 1"),
    ],
)
def test_a_consequence_yields_to_the_origin_that_is_seen_later(consequence):
    assert first_cause([DatedCause(1.0, consequence), DatedCause(2.0, ORIGIN)]) is ORIGIN
    assert first_cause([DatedCause(1.0, consequence)]) is consequence


@pytest.mark.parametrize(
    "origin",
    [
        failed(1, None, -9, "signal"),
        failed(1, None, -11, "signal", "Connection closed by peer"),
        failed(1, None, 3, "exit", "assertion failed"),
        Cause("lost", 1, "host-1", exception="its connection to the control node was closed"),
        Cause("step", 1, "host-1", exception="KeyError: 'x'"),
        Cause("timeout", 0, "host-0", exception="it ran longer than 5 s"),
        Cause("agent", 1, "host-1", exit_code=-9, exception="its torchrun agent was killed by SIGKILL"),
    ],
)
def test_an_origin_of_any_kind_beats_a_broken_connection(origin):
    reset = failed(0, "RuntimeError: Connection reset by peer")
    assert first_cause([DatedCause(1.0, reset), DatedCause(2.0, origin)]) is origin


# --- the cause itself ------------------------------------------------------------------------------


def test_a_cause_survives_the_wire():
    cause = Cause("exception", 2, "hőst", 5, 1, 1, "ValueError: größe\n🙂", "Traceback…\n\x00\x1b[0m")
    assert Cause.from_wire(json.loads(json.dumps(cause.to_wire()))) == cause


def test_unknown_fields_of_a_newer_peer_are_ignored():
    assert Cause.from_wire({**ORIGIN.to_wire(), "colour": "red"}) == ORIGIN


def test_eight_causes_of_any_size_fit_into_a_frame():
    huge = failed(0, "\x01" * 10_000_000, detail="\x02" * 10_000_000).to_wire()
    assert len(json.dumps([{"cause": huge, "age_s": 1.5}] * 8)) < MAX_FRAME_BYTES


def test_a_cut_cause_keeps_the_type_and_the_last_lines():
    cause = Cause.from_wire(failed(0, "ValueError: " + "x" * 100_000, detail="y" * 100_000 + "THE END").to_wire())
    assert cause.exception.startswith("ValueError: x")
    assert cause.detail.endswith("THE END")


def test_a_report_says_who_what_and_where():
    text = Cause("exception", 2, "host-2", 5, 1, 1, "ValueError: loss is nan", "\n".join(PLAIN)).describe()
    assert text.startswith("Rank 5 on node 2 (host host-2) failed with ValueError: loss is nan.")
    assert "exited with code 1" in text
    for line in PLAIN:
        assert line in text


def test_a_report_without_traceback_shows_stderr():
    text = Cause("exit", 2, "host-2", 5, 1, 3, None, "last words").describe()
    assert "Rank 5 on node 2 (host host-2) exited with code 3." in text
    assert "Last lines of its stderr:" in text
    assert "last words" in text


def test_a_report_on_a_node_names_no_rank():
    text = Cause("lost", 2, "host-2", exception="its task was killed by SIGKILL").describe()
    assert text == "Node 2 (host host-2) failed: its task was killed by SIGKILL."


def test_a_killed_worker_with_an_older_traceback_is_said_to_be_killed_once():
    text = Cause("signal", 0, "h", 0, 0, -9, "ValueError: handled long ago", "x").describe()
    assert text.count("was killed by SIGKILL") == 1


def test_an_out_of_memory_kill_says_so_once():
    cause = Cause("oom", 1, "host-1", 3, 1, -signal.SIGKILL, describe_oom(2**30), "loading\n")
    text = cause.describe()
    assert text.startswith(
        "Rank 3 on node 1 (host host-1) ran out of memory: the node's memory limit of 1 GiB was reached"
    )
    assert text.count("SIGKILL") == 1


def test_of_a_nodes_failures_the_origin_is_reported_however_many_saw_only_their_peer_vanish():
    lost_peer = [
        {
            "cause": Cause("exception", 1, "h", rank, rank, 1, "ConnectionError: Connection reset by peer").to_wire(),
            "age_s": 2.0,
        }
        for rank in range(20)
    ]
    origin = {"cause": Cause("exception", 1, "h", 20, 20, 1, "ValueError: x").to_wire(), "age_s": 0.5}
    assert first_reported([*lost_peer, origin]) == [origin]
    assert first_reported(lost_peer[3:]) == [lost_peer[3]]
    assert first_reported([]) == []
