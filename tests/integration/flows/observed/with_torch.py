"""What a program sees once it has imported torch."""

import atexit
import ctypes
import logging
import multiprocessing
import os
import sys
import threading

import interpreter
import torch
import torch.distributed as dist


def everything() -> dict[str, object]:
    """What torch has read and set when it was imported, flat."""
    numpy = sys.modules.get("numpy")
    return {
        "torch modules": sorted(sys.modules),
        "exit handlers with torch": atexit._ncallbacks(),
        "threads that compute": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel info": torch.__config__.parallel_info(),
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), torch.backends.cuda.is_built()],
        "sharing": [torch.multiprocessing.get_sharing_strategy(), multiprocessing.get_start_method(allow_none=True)],
        "distributed": [dist.is_initialized(), str(dist.get_debug_level()), dist.is_torchelastic_launched()],
        "numpy": numpy and [numpy.geterr(), numpy.get_printoptions()["precision"]],
        "floats with torch": [5e-324 * 1.0, torch.tensor(1e-310, dtype=torch.float64).mul(1).item()],
        "warnings with torch": sorted(interpreter.warning_filters()),
        "loggers": _loggers(),
        "environment with torch": sorted(os.environ),
        "environment in C with torch": _environment_in_c(),
        "threads with torch": [thread.name for thread in threading.enumerate()],
        "recursion limit with torch": sys.getrecursionlimit(),
    }


def _loggers() -> dict[str, object]:
    """Those of which something is set."""
    found = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    set_up = {name: each for name, each in found.items() if each.handlers or each.level or not each.propagate}
    shown = {
        name: [each.level, [_handler(one) for one in each.handlers], each.propagate] for name, each in set_up.items()
    }
    return dict(sorted({"root": [logging.root.level, list(map(repr, logging.root.handlers))], **shown}.items()))


def _handler(handler: logging.Handler) -> list[object]:
    stream = getattr(handler, "stream", None)
    return [type(handler).__name__, stream is sys.stderr, getattr(stream, "name", None)]


def _environment_in_c() -> list[str]:
    """The variables that only C code has."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    names, at = set(), 0
    while entries[at] is not None:
        names.add(os.fsdecode(entries[at].partition(b"=")[0]))
        at += 1
    return sorted(names ^ set(os.environ))


def randomness() -> dict[str, object]:
    """What torch, numpy and OpenSSL draw."""
    import ssl

    import numpy

    return {
        "torch's generator": torch.rand(1).item(),
        "seed of torch": torch.initial_seed(),
        "a generator of torch's": torch.Generator().seed(),
        "ssl": ssl.RAND_bytes(8).hex(),
        "numpy": numpy.random.random(),
        "a generator of numpy's": numpy.random.default_rng().random(),
    }


def computed() -> dict[str, object]:
    """What comes of computing in threads, and of gradients."""
    import numpy

    torch.set_num_interop_threads(2)  # an error once anything has been computed
    torch.manual_seed(1)
    square = numpy.arange(90_000.0).reshape(300, 300)
    product = float((square @ square).sum())
    left = torch.rand(300, 300, requires_grad=True)
    (left @ left.T).sin().sum().backward()
    return {"product": product, "gradient": left.grad.sum().item()}


def reduced() -> dict[str, object]:
    """What comes of collectives."""
    dist.init_process_group("gloo")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    dist.barrier()
    dist.destroy_process_group()
    return {"reduced": total.item(), "gathered": gathered}
