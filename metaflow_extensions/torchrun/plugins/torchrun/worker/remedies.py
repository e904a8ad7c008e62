"""What to change after what torch, CUDA or NCCL raise. A worker says it as it ends, with its exception (`worker_hooks`)."""

from __future__ import annotations

import re

# Most are about a backend of ``torch.distributed`` that the PyTorch or the node of a script does not have. Nothing can
# check that before the launch, since only the script names its backend.
_NO_CUDA = (
    "This PyTorch is built without CUDA. Install one for CUDA where the step runs, or let the script use the CPU "
    'and the backend "gloo".'
)
_NO_GPU = (
    "No GPU is visible to this process. Request GPUs by gpu=... of @kubernetes, @batch or @resources, look at the "
    'driver and at CUDA_VISIBLE_DEVICES, or let the script use the CPU and the backend "gloo".'
)
_ONE_GPU_EACH = (
    "Each process needs a GPU of its own: let nproc_per_node be at most the GPUs of a node, and call "
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group.'
)

# What torch 2.13 raises, in distributed/distributed_c10d.py, cuda/__init__.py and ProcessGroupNCCL.cpp, CUDA, and
# NCCL (init.cc). Some of it is older than torch 2.1, and worded the same there.
_REMEDIES = [
    (
        r"package doesn't have MPI built in",
        'The PyTorch of PyPI has no MPI. Use the backend "gloo" on CPUs or "nccl" on GPUs: both do without. If it has '
        "to be MPI, it takes a PyTorch that is built with it, and mpirun to start the ranks.",
    ),
    (r"package doesn't have NCCL built in|Torch not compiled with CUDA enabled", _NO_CUDA),
    (
        r"package doesn't have (XCCL|Gloo) built in|Torch not compiled with \w+ enabled",
        "This PyTorch is built without it. Install another build where the step runs, or choose another backend or device.",
    ),
    (
        r"Unknown (c10d )?backend type",
        'PyTorch itself has "gloo" for CPUs and "nccl" for GPUs. Any other name has to be registered by a package that the '
        "script imports before init_process_group.",
    ),
    (
        r"Default process group has not been initialized",
        'No process group exists. For a function, current.torch.run(..., process_group="auto") makes one on every rank and '
        "ends it after; a script calls torch.distributed.init_process_group().",
    ),
    (
        r"trying to initialize the default process group twice",
        "A process group exists already. A function that current.torch.run(..., process_group=...) calls has one: leave out "
        "process_group or its own init_process_group().",
    ),
    (
        r"^(bdb\.)?BdbQuit|^EOFError: EOF when reading a line",
        "Workers have no keyboard. To use a breakpoint, start the script in a terminal, with torchrun and one process.",
    ),
    (r"only supported with GPUs, no GPUs found|Found no NVIDIA driver|No CUDA GPUs are available", _NO_GPU),
    # Of two ranks on one GPU, NCCL 2.18 to 2.28 say the second, 2.30 the third.
    (r"invalid device ordinal|Duplicate GPU detected|Multiple Ranks are using the same GPU", _ONE_GPU_EACH),
]


def remedy(exception: str) -> str:
    """Return what to change after an exception, given as type and message; empty where nothing is known."""
    return next((text for pattern, text in _REMEDIES if re.search(pattern, exception)), "")
