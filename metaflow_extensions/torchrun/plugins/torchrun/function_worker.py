"""Calls a function in a worker; torchrun runs this file with the folder of a `function_call` as its argument.

It stands alone: besides the standard library it needs torch, and only where a process group is asked for or
a value lies on a device. The file of the flow is imported only if the call needs something of it, under
another name than ``__main__``, so that it does not run.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_CALL, _VALUES = "call.pkl", "values"
_RETURNED, _RAISED = "returned-{}.pkl", "raised-{}.pkl"
_MAIN = "__torchrun_main__"


class CantReturn(Exception):
    """A value that can't be pickled; its text names rank and type."""


def main() -> None:
    """Make the call, and leave what it returned or raised for the task."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    values = os.path.join(folder, _VALUES)
    try:
        with open(os.path.join(folder, _CALL), "rb") as file:
            header = pickle.load(file)  # noqa: S301 - written by this worker's own task
            sys.path[:] = header["path"]
            sys.argv[:] = [header["main"] or ""]
            function, args, kwargs = CallUnpickler(file, header["main"]).load()
        with process_group(header["init"]):
            value = function(*args, **kwargs)
            store(value, rank, os.path.join(values, _RETURNED.format(rank)))
            del function, args, kwargs, value  # see the end of process_group
    except Exception as error:
        with whole(os.path.join(values, _RAISED.format(rank))) as file:
            pickle.dump(report_of(error), file)
        raise


# --- the call ---------------------------------------------------------------------------------


class CallUnpickler(pickle.Unpickler):
    """Finds what was defined in the flow file by importing that file as a module."""

    def __init__(self, file: Any, main: str | None) -> None:
        super().__init__(file)
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        """Return what `name` of `module` means."""
        if module == "__main__" and self._main is not None:
            import_main(self._main)
            self._main = None
        return super().find_class(module, name)


def import_main(path: str) -> None:
    """Import the program of the task as this process's ``__main__``, without running it."""
    spec = importlib.util.spec_from_file_location(_MAIN, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN] = sys.modules["__main__"] = module
    with flows_do_not_run():
        spec.loader.exec_module(module)
    rename(module)
    # So that processes that this one spawns import the file anew (multiprocessing.spawn) and what is defined
    # from now on says where it comes from as everything else.
    module.__spec__ = None
    module.__name__ = "__main__"


@contextmanager
def flows_do_not_run() -> Any:
    """Keep a flow file that calls its flow without ``if __name__ == "__main__"`` from starting a run."""
    try:
        flow_class = importlib.import_module("metaflow").FlowSpec
    except ImportError:
        yield
        return
    original = flow_class.__init__
    flow_class.__init__ = lambda self, use_cli=True: original(self, use_cli=False)
    try:
        yield
    finally:
        flow_class.__init__ = original


def rename(module: ModuleType) -> None:
    """Have everything defined in `module` say ``__main__``, as in the task and in later steps."""
    stack, seen = list(vars(module).values()), set()
    while stack:
        thing = stack.pop()
        if getattr(thing, "__module__", None) != _MAIN or id(thing) in seen:
            continue
        seen.add(id(thing))
        thing.__module__ = "__main__"
        if isinstance(thing, type):
            stack += [getattr(member, "__func__", member) for member in vars(thing).values()]


@contextmanager
def process_group(init: str | None) -> Any:
    """Make the process group that was asked for, on this rank's own device, and end it after the call."""
    if init is None:
        yield
        return
    import torch
    import torch.distributed as dist

    backend = init if init != "auto" else "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    yield
    # A DistributedDataParallel object that is alive now can abort the interpreter's exit (torch 2.13, gloo).
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


# --- what comes back --------------------------------------------------------------------------


class ValuePickler(pickle.Pickler):
    """Pickles tensors of devices as tensors of the CPU: who reads them may have no such device."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how `thing` is pickled if it is such a tensor."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(thing, torch.Tensor) or not is_elsewhere(thing):
            return NotImplemented
        here = thing.detach().cpu()
        if isinstance(thing, torch.nn.Parameter):
            here = torch.nn.Parameter(here, requires_grad=thing.requires_grad)
        else:
            here.requires_grad_(thing.requires_grad)
        return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def is_elsewhere(tensor: Any) -> bool:
    """Tell whether a tensor lies on a device that another process may not have."""
    return tensor.device.type not in ("cpu", "meta")


def store(value: Any, rank: int, path: str) -> None:
    """Pickle a value into a file.

    Raises
    ------
    CantReturn
        If it can't be pickled.
    """
    try:
        with whole(path) as file:
            ValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except OSError:
        raise  # the disk's failure, not the value's
    except Exception as error:
        try:
            with whole(path) as file:
                importlib.import_module("cloudpickle").dump(value, file)
        except Exception:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            text = f"Rank {rank} returned a {kind}, which can't be pickled: {type(error).__name__}: {error}"
            raise CantReturn(text) from error


def report_of(error: Exception) -> dict[str, Any]:
    """Return an exception as the task wants it: pickled if it survives that, and in words."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, CantReturn):
        return {"exception": None, "text": str(error)}
    try:
        data = pickle.dumps(error)
        survives = type(pickle.loads(data)) is type(error)  # noqa: S301 - just pickled here
    except Exception:
        survives = False
    return {"exception": data if survives else None, "text": text}


@contextmanager
def whole(path: str) -> Any:
    """Open a file that is either there as a whole or not at all."""
    with open(path + ".part", "wb") as file:
        yield file
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
