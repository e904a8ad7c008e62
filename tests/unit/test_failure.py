"""From what a failed worker left behind to a cause that can be named."""

import json
import signal
import subprocess
import sys

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.channel import MAX_FRAME_BYTES
from metaflow_extensions.torchrun.plugins.torchrun.failure import (
    TAIL_LINES,
    Cause,
    DatedCause,
    WorkerEnd,
    describe_exit,
    ends_reported_by_agent,
    find_exception,
    first_cause,
    read_error_file,
    read_tail,
    signal_name,
    worker_cause,
)
from metaflow_extensions.torchrun.plugins.torchrun.memory import describe_oom

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 2, in main
    raise ValueError("loss is nan")
ValueError: loss is nan""".splitlines()

CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 2, in <module>
    {}["k"]
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 4, in <module>
    raise RuntimeError("no config") from None
RuntimeError: no config""".splitlines()


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


# --- tracebacks ----------------------------------------------------------------------------------


def test_a_plain_exception_is_found():
    assert find_exception(PLAIN) == ("ValueError: loss is nan", "\n".join(PLAIN))


def test_noise_before_and_after_is_left_out():
    noise = ["[W1121 05:21:55] something", "", "epoch 1"]
    assert find_exception([*noise, *PLAIN, "", "noise"]) == ("ValueError: loss is nan", "\n".join(PLAIN))


@pytest.mark.parametrize(
    "noise",
    [
        "[rank0]:[W1121 ProcessGroupNCCL.cpp] destroy_process_group() was not called",
        "Exception ignored in: <x>",
        "E1121 x",
    ],
)
def test_foreign_lines_right_behind_are_left_out(noise):
    assert find_exception([*PLAIN, noise]) == ("ValueError: loss is nan", "\n".join(PLAIN))


def test_a_chained_exception_is_shown_with_its_chain():
    assert find_exception(["before", *CHAINED]) == ("RuntimeError: no config", "\n".join(CHAINED))


def test_a_direct_cause_belongs_to_the_chain():
    lines = [
        line.replace("During handling of the above exception, another exception occurred:", BECAUSE) for line in CHAINED
    ]
    assert find_exception(lines)[1] == "\n".join(lines)


BECAUSE = "The above exception was the direct cause of the following exception:"


def test_an_earlier_unrelated_traceback_is_not_part_of_it():
    assert find_exception([*CHAINED, "", "recovered", *PLAIN]) == ("ValueError: loss is nan", "\n".join(PLAIN))


def test_a_message_of_many_lines_is_whole():
    lines = [*PLAIN[:-1], "RuntimeError: sizes differ:", "  got 3", "  want 4"]
    assert find_exception([*lines, "", "later"])[0] == "RuntimeError: sizes differ:\n  got 3\n  want 4"


@pytest.mark.parametrize(
    "last",
    ["KeyboardInterrupt", "torch.cuda.OutOfMemoryError: CUDA out of memory", "my_pkg.sub.Größe: 模型", "_Private: x"],
)
def test_exceptions_of_any_name_are_found(last):
    assert find_exception([*PLAIN[:-1], last])[0] == last


@pytest.mark.parametrize("lines", [[], ["just noise"], ["Traceback (most recent call last):"], PLAIN[:3]])
def test_without_a_whole_traceback_there_is_none(lines):
    assert find_exception(lines) is None


def run_python(script, tmp_path):
    path = write(tmp_path / "it's a script.py", script)
    done = subprocess.run([sys.executable, "-I", "-S", str(path)], capture_output=True, text=True, check=False)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("script", "exception"),
    [
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("compile('def f(', 'x', 'exec')", "SyntaxError: '(' was never closed (x, line 1)"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('größe') from e", "ValueError: größe"),
        ("assert 1 == 2", "AssertionError"),
        ("raise SystemError", "SystemError"),
        ("class Odd(Exception): pass\nraise Odd('two\\nlines')", "__main__.Odd: two\nlines"),
    ],
)
def test_what_python_really_prints_is_understood(script, exception, tmp_path):
    found, trace = find_exception(run_python(script, tmp_path))
    assert exception.split(" (x")[0] in found or found in exception
    assert trace.startswith("Traceback (most recent call last):")


def test_a_syntax_error_of_the_script_itself_is_named(tmp_path):
    # Python prints it without "Traceback (most recent call last):".
    found = find_exception(["noise", *run_python("def f(", tmp_path)])
    assert found is not None
    assert found[0] == "SyntaxError: '(' was never closed"


def test_torchs_rank_prefixes_are_taken_off(tmp_path):
    log = write(tmp_path / "stderr.log", "".join(f"[rank3]: {line}\n" for line in CHAINED))
    assert find_exception(read_tail(str(log))) == ("RuntimeError: no config", "\n".join(CHAINED))


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


def test_torchelastics_error_file_is_read(tmp_path):
    file = write(tmp_path / "error.json", elastic_error("ValueError: größe"))
    assert read_error_file(str(file)) == ("ValueError: größe", "Traceback: here")


def test_an_error_file_with_a_bare_message_is_read(tmp_path):
    assert read_error_file(str(write(tmp_path / "e", '{"message": "gone"}'))) == ("gone", "gone")


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"message": {"mess', "[]", "null", "3", "{}", '{"message": null}', '{"message": {}}', '{"message": 3}'],
)
def test_a_broken_error_file_counts_as_none(text, tmp_path):
    assert read_error_file(str(write(tmp_path / "error.json", text))) is None


def test_a_missing_error_file_counts_as_none(tmp_path):
    assert read_error_file(str(tmp_path / "error.json")) is None


# --- a worker's end -> cause -----------------------------------------------------------------------


@pytest.fixture
def cause_of(tmp_path):
    def make(exit_code, stderr=None, error=None, stopped=False):
        log, file = tmp_path / "stderr.log", tmp_path / "error.json"
        if stderr is not None:
            write(log, stderr)
        if error is not None:
            write(file, error)
        return worker_cause(WorkerEnd(1, 5, exit_code, stopped, 0.0), 2, "host-2", str(log), str(file))

    return make


def test_success_has_no_cause(cause_of):
    assert cause_of(0, stderr="\n".join(PLAIN)) is None


def test_an_exception_is_the_cause(cause_of):
    expected = Cause("exception", 2, "host-2", 5, 1, 1, "ValueError: loss is nan", "\n".join(PLAIN))
    assert cause_of(1, stderr="\n".join(PLAIN)) == expected


def test_the_error_file_says_more_than_stderr(cause_of):
    cause = cause_of(1, stderr="\n".join(PLAIN), error=elastic_error("RuntimeError: recorded"))
    assert (cause.kind, cause.exception, cause.detail) == ("exception", "RuntimeError: recorded", "Traceback: here")


def test_a_broken_error_file_leaves_the_word_to_stderr(cause_of):
    assert cause_of(1, stderr="\n".join(PLAIN), error='{"message":').exception == "ValueError: loss is nan"


def test_without_exception_the_end_of_stderr_is_shown(cause_of):
    cause = cause_of(3, stderr="".join(f"line {i}\n" for i in range(100)))
    assert (cause.kind, cause.exit_code, cause.exception) == ("exit", 3, None)
    assert cause.detail.splitlines() == [f"line {i}" for i in range(70, 100)]


def test_without_any_file_there_is_still_a_cause(cause_of):
    assert cause_of(3) == Cause("exit", 2, "host-2", 5, 1, 3)


def test_a_signal_is_the_cause(cause_of):
    cause = cause_of(-9, stderr="loading\n")
    assert (cause.kind, cause.exit_code, cause.detail) == ("signal", -9, "loading")
    assert "Rank 5 on node 2 (host host-2) was killed by SIGKILL" in cause.describe()


@pytest.mark.parametrize("code", [-15, -9, 1, 143])
def test_a_worker_that_obeyed_is_no_cause(code, cause_of):
    assert cause_of(code, stderr="bye\n", stopped=True) is None


def test_a_worker_that_was_failing_while_we_stopped_it_is_a_cause(cause_of):
    cause = cause_of(-15, stderr="\n".join(PLAIN), stopped=True)
    assert (cause.kind, cause.exit_code, cause.exception) == ("exception", None, "ValueError: loss is nan")


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
    assert f"Last {TAIL_LINES} lines of its stderr" in text
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
