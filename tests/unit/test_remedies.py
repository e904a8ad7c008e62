"""What to change after an exception that does not say it itself; the texts are torch's, CUDA's and NCCL's own."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.launch import Launch
from metaflow_extensions.torchrun.plugins.torchrun.gang.remedies import remedy, remedy_of_exit
from metaflow_extensions.torchrun.plugins.torchrun.task.report import report

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
        ("AssertionError: Torch not compiled with CUDA enabled", "built without CUDA"),
        ("AssertionError: Torch not compiled with XPU enabled", "another build"),
        ("RuntimeError: Distributed package doesn't have XCCL built in", "another build"),
        ("AssertionError: Unknown backend type glo", "registered by a package"),
        ("AssertionError: Unknown c10d backend type UCC", "registered by a package"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "Request GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that", "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        ("RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be", "LOCAL_RANK"),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "a GPU of its own",
        ),
        (f"ValueError: {NO_GROUP}", 'process_group="auto"'),
        (f"RuntimeError: {NO_GROUP}", 'process_group="auto"'),  # torch 2.0
        ("ValueError: trying to initialize the default process group twice!", "leave out process_group"),
        ("ValueError: loss is nan", ""),
        ("KeyError", ""),
    ],
)
def test_what_to_change(exception, words):
    found = remedy(exception)
    assert words in found
    assert bool(found) is bool(words)


def no_mpi(kind="exception"):
    return Cause(kind, 1, "b", 3, 1, 1, NO_MPI, f"Traceback (most recent call last):\n{NO_MPI}")


def test_the_error_says_what_to_change_after_what_has_happened():
    lines = no_mpi().describe().splitlines()
    assert lines[:3] == [f"Rank 3 on node 1 (host b) failed with {NO_MPI}", "It exited with code 1.", remedy(NO_MPI)]
    assert remedy(NO_MPI) in Launch(0).error(no_mpi(), []).message


def test_only_what_a_worker_says_itself_has_a_remedy():
    """The step's own code may have handed on what it was told, and the end of stderr is no cause."""
    assert no_mpi("step").remedy == ""
    assert Cause("exit", 1, "b", 3, 1, 1, None, NO_MPI).remedy == ""


def test_it_is_shown_once_also_with_the_exception_of_a_function():
    verdict = Launch(0).error(no_mpi(), [])
    assert report(verdict, 1, shared=True, known=True, stands_above=lambda _: True).count(remedy(NO_MPI)) == 1
    raised = RuntimeError(NO_MPI)
    raised.__cause__ = verdict
    for live in (True, False):
        assert (
            report(raised, 1, shared=True, known=True, stands_above=lambda _, live=live: live).count(remedy(NO_MPI))
            == 1
        )


@pytest.mark.parametrize(
    ("code", "bools", "words"),
    [
        (
            2,
            [("amp", True)],
            "{'amp': True} in entrypoint_args is passed as two words, --amp true. Write {'amp': None} for",
        ),
        (2, [("-v", False), ("it's *🙂", True)], "as two words, --it's *🙂 true. Write {\"it's *🙂\": None} for"),
        (2, [("-v", False)], "as two words, -v false. Write {'-v': None} for"),
        (1, [("amp", True)], None),
        (None, [("amp", True)], None),
        (2, [], None),
    ],
)
def test_what_to_change_where_a_script_refuses_the_word_true(code, bools, words):
    assert words in remedy_of_exit(code, bools) if words else remedy_of_exit(code, bools) == ""
