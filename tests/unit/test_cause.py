"""How a failure is reported, which of several was the first, and what to change after it."""

from dataclasses import replace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import (
    Cause,
    Failure,
    first_failure,
    remedy_of_exit,
)
from metaflow_extensions.torchrun.plugins.torchrun.worker.remedies import remedy

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
DUPLICATE_GPU = INVALID_USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
SAME_GPU = (
    INVALID_USAGE + "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this."
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
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 TiB. GPU 0 has 79 GiB"


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
        failed(
            0, "RuntimeError: Broken pipe", 1, "exception", 'File "/x/site-packages/torch/distributed/c.py", line 1'
        ),
        failed(0, "torch.distributed.DistNetworkError: failed to recv, got 0 bytes"),
        failed(0, "torch.distributed.DistStoreError: Timed out after 300 seconds waiting for clients"),
        failed(0, None, 1, "exit", "[E] Watchdog caught collective operation timeout: WorkNCCL"),
        failed(0, None, 1, "exit", "epoch 3\n[W TCPStore.cpp:125] recvValue failed: Connection reset by peer\nbye"),
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
        failed(1, "SystemExit: stopped", -15, "signal"),
        failed(1, DUPLICATE_GPU),
        failed(1, CUDA_ERROR),
        failed(1, OUT_OF_MEMORY),
        failed(1, "ConnectionResetError: [Errno 104] Connection reset by peer"),
        failed(
            1, "OperationalError: connection refused", 1, "exception", 'File "/x/site-packages/db/connect.py", line 1'
        ),
        failed(1, None, 1, "exit", "curl: (7) Failed to connect to tracking server: Connection refused"),
        failed(1, None, 1, "exit", "NCCL INFO Bootstrap: using eth0\ncurl: (7) Connection refused"),
        # A script in a folder that is called as a library, a host that is, and what torch hands on of the script's own.
        failed(1, "ConnectionRefusedError: refused", 1, "exception", '  File "/home/me/nccl/train.py", line 1'),
        failed(1, "requests.exceptions.ConnectionError: host='nccl-logs': Connection refused"),
        failed(
            1,
            "ConnectionRefusedError: Caught ConnectionRefusedError in DataLoader worker process 0.\nConnection refused",
            detail='  File "/x/site-packages/torch/_utils.py", line 1, in reraise',
        ),
        failed(
            1,
            "torch.distributed.checkpoint.api.CheckpointException: ranks:dict_keys([0])\nConnection refused",
            detail='  File "/x/site-packages/torch/distributed/checkpoint/utils.py", line 1',
        ),
        Cause("lost", 1, "host-1", exception="its connection to the control node was closed"),
        Cause("step", 1, "host-1", exception="ConnectionError: Connection reset by peer"),
        Cause("timeout", 0, "host-0", exception="it ran longer than 5 s"),
        Cause("agent", 1, "host-1", exit_code=-9, exception="its torchrun agent was killed by SIGKILL"),
    ],
)
def test_an_origin_of_any_kind_beats_a_broken_connection(origin):
    assert first(failed(0, "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection reset by peer"), origin) is origin


# --- the cause itself ------------------------------------------------------------------------------


def test_what_a_worker_of_a_dataloader_has_raised_is_told_in_one_line():
    trace = 'Traceback (most recent call last):\n  File "train.py", line 28, in __getitem__\n    raise KeyError(name)\n'
    wrapped = f"KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal {trace}KeyError: 'sample 700'\n"
    cause = replace(ORIGIN, exception=wrapped, place="train.py:28")
    assert cause.what == "failed at train.py:28 with KeyError: 'sample 700' (in DataLoader worker process 0)"


def test_a_cause_is_the_same_again_after_being_plain_data_of_a_bounded_size():
    assert ORIGIN.as_dict()["category"] == "user"
    long = replace(ORIGIN, exception="begin" + "x" * 100_000, detail="y" * 100_000 + "end", advice="z" * 100_000)
    data = long.as_dict()
    assert [len(data[name]) for name in ("exception", "detail", "advice")] == [8192] * 3
    assert (data["exception"][:5], data["detail"][-3:]) == ("begin", "end")


# --- what to change; the texts are torch's, CUDA's and NCCL's own -----------------------------------

NO_MPI = (
    "RuntimeError: Distributed package doesn't have MPI built in. MPI is only included if you build PyTorch from "
    "source on a host that has MPI installed."
)
NO_GROUP = "Default process group has not been initialized, please make sure to call init_process_group."


@pytest.mark.parametrize(
    ("exception", "words"),
    [
        (NO_MPI, '"gloo" on CPUs or "nccl" on GPUs'),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "built without CUDA"),
        ("AssertionError: Torch not compiled with XPU enabled", "another build"),
        ("AssertionError: Unknown backend type glo", "registered by a package"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "Request GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that", "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be", "LOCAL_RANK"),
        (DUPLICATE_GPU, "a GPU of its own"),
        (SAME_GPU, "a GPU of its own"),
        (f"ValueError: {NO_GROUP}", 'process_group="auto"'),
        (f"RuntimeError: {NO_GROUP}", 'process_group="auto"'),  # torch 2.0
        ("ValueError: trying to initialize the default process group twice!", "leave out process_group"),
        (CUDA_ERROR, ""),
        ("KeyError", ""),
    ],
)
def test_what_to_change_after_an_exception(exception, words):
    found = remedy(exception)
    assert words in found
    assert bool(found) is bool(words)


def test_what_to_change_stands_after_what_has_happened():
    cause = Cause("exception", 1, "b", 3, 1, 1, NO_MPI, f"Traceback (most recent call last):\n{NO_MPI}", remedy(NO_MPI))
    lines = cause.describe().splitlines()
    assert lines[:3] == [f"Rank 3 on node 1 (host b) failed with {NO_MPI}", "It exited with code 1.", remedy(NO_MPI)]


@pytest.mark.parametrize("line", ["bdb.BdbQuit", "EOFError: EOF when reading a line"])
def test_a_script_that_asks_a_keyboard_is_told_that_there_is_none(line):
    assert "Workers have no keyboard." in remedy(line)


@pytest.mark.parametrize(("code", "stderr", "is_told"), [(3, " \n", True), (3, "no data", False), (0, "", False)])
def test_a_script_that_ends_without_a_word_is_told_to_say_why(code, stderr, is_told):
    assert ("Look for sys.exit(3) or os._exit(3)" in remedy_of_exit(code, [], stderr)) == is_told


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [
        (-6, "terminate called without an active exception", "gc.collect() before destroy_process_group()"),
        (-6, "Is there a distributed collective mismatch in your code?", "the same number of steps"),
        (-6, "free(): invalid pointer", ""),
        (-11, "terminate called without an active exception", ""),
    ],
)
def test_what_to_change_after_an_abort_depends_on_what_native_code_said(code, stderr, words):
    assert words in remedy_of_exit(code, [], stderr)
    assert words or remedy_of_exit(code, [], stderr) == ""
