"""How a failure is told, and which of several was the first."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure, describe_exit, first_failure

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


# --- which came first ------------------------------------------------------------------------------


def failed(rank, exception=None, code=1, kind="exception", detail=""):
    return Cause(kind, rank, f"host-{rank}", rank, 0, code, exception, detail)


ORIGIN = failed(1, "ValueError: loss is nan")
# What torch (checkForNCCLErrors in NCCLUtils.cpp) and NCCL write, line by line.
NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
)
INVALID_USAGE = (
    NCCL_ERROR + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
SAME_GPU = (
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
)
CUDA_ERROR = (
    NCCL_ERROR + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
REMOTE_ERROR = (
    NCCL_ERROR
    + "remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed "
    "possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer node-1<10.0.0.7:4242>"
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 TiB. GPU 0 has a total capacity of 79 GiB"
)


def first(*causes):
    """Return the cause of causes that are seen one second after the other, in whatever order they are reported."""
    failures = [Failure(cause, -second) for second, cause in enumerate(causes)]
    found = [first_failure(given) for given in (failures, reversed(failures))]
    assert found[0] is found[1]
    return found[0].cause


def test_the_earliest_failure_is_the_cause():
    assert first_failure([]) is None
    assert first(ORIGIN, failed(0, "KeyError: 1")) is ORIGIN


@pytest.mark.parametrize(
    "consequence",
    [
        failed(0, "RuntimeError: [../third_party/gloo/pair.cc:525] Connection closed by peer [10.0.0.7]:4242"),
        failed(0, REMOTE_ERROR),
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
    assert first(consequence, ORIGIN) is ORIGIN
    assert first(consequence) is consequence


@pytest.mark.parametrize(
    "origin",
    [
        failed(1, None, -9, "signal"),
        failed(1, None, -11, "signal", "Connection closed by peer"),
        failed(1, None, 3, "exit", "assertion failed"),
        failed(1, INVALID_USAGE + SAME_GPU[0]),
        failed(1, CUDA_ERROR),
        failed(1, OUT_OF_MEMORY),
        Cause("lost", 1, "host-1", exception="its connection to the control node was closed"),
        Cause("step", 1, "host-1", exception="KeyError: 'x'"),
        Cause("timeout", 0, "host-0", exception="it ran longer than 5 s"),
        Cause("agent", 1, "host-1", exit_code=-9, exception="its torchrun agent was killed by SIGKILL"),
    ],
)
def test_an_origin_of_any_kind_beats_a_broken_connection(origin):
    assert first(failed(0, "RuntimeError: Connection reset by peer"), origin) is origin


@pytest.mark.parametrize("text", SAME_GPU)
def test_two_ranks_on_one_gpu_are_told_what_to_change(text):
    cause = failed(1, INVALID_USAGE + text)
    assert cause.category == "user"
    assert cause.remedy.startswith("Each process needs a GPU of its own")
    assert cause.remedy in cause.describe()
    assert failed(1, CUDA_ERROR).remedy == ""


# --- the cause itself ------------------------------------------------------------------------------


def test_a_cause_is_the_same_again_after_being_plain_data():
    assert Cause.from_dict({**ORIGIN.as_dict(), "colour": "red"}) == ORIGIN
    assert ORIGIN.as_dict()["category"] == ORIGIN.category


@pytest.mark.parametrize(
    ("cause", "report"),
    [
        (
            Cause("exception", 2, "host-2", 5, 1, 1, "ValueError: loss is nan", "Traceback:\n  in main\nValueError"),
            "Rank 5 on node 2 (host host-2) failed with ValueError: loss is nan.\nIt exited with code 1.\n"
            "  | Traceback:\n  |   in main\n  | ValueError",
        ),
        (
            Cause("exit", 2, "host-2", 5, 1, 3, None, "last words"),
            "Rank 5 on node 2 (host host-2) exited with code 3.\nLast lines of its stderr:\n  | last words",
        ),
        (
            Cause("lost", 2, "host-2", exception="its task was killed by SIGKILL"),
            "Node 2 (host host-2) failed: its task was killed by SIGKILL.",
        ),
        (
            Cause("signal", 0, "h", 0, 0, -10, "ValueError: handled long ago"),
            "Rank 0 on node 0 (host h) was killed by SIGUSR1.",
        ),
        (
            Cause("oom", 1, "host-1", 3, 1, -9, "out of memory: the kernel sent SIGKILL", "loading\n"),
            "Rank 3 on node 1 (host host-1) ran out of memory: the kernel sent SIGKILL.\n"
            "Last lines of its stderr:\n  | loading",
        ),
    ],
    ids=lambda given: given.kind if isinstance(given, Cause) else "",
)
def test_a_report_says_who_what_and_why_once(cause, report):
    assert cause.describe() == report
