"""The worker's side of a function as entrypoint: torchrun runs this file, with the folder of a `FunctionCall`.

It needs the standard library, and torch only if a process group is asked for or a value lies on a device. It imports
the flow's file only if the call refers to something there, and under another name than ``__main__``, so that the flow
does not run.

`call`, the task's side, imports this file too: both sides pickle in the same way and use the same file names.
"""

from __future__ import annotations

import gc
import importlib
import io
import linecache
import operator
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

# The files in the folder of a call: the call itself, and what each rank has returned or raised.
CALL, VALUES = "call.pkl", "values"
RETURNED, RAISED = "returned-{}.pkl", "raised-{}.pkl"
_MAIN = "__torchrun_main__"
_NO_FILE = "<dynamic-code>"


class CantReturn(Exception):
    """A value that can't be pickled; its text names rank and type."""


class FlowStarts(BaseException):
    """Ends the import of a file where it would run its flow, or launch again."""


def main() -> None:
    """Make the call, and write what it returned or raised into a file for the task."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    try:
        with open(os.path.join(folder, CALL), "rb") as file:
            header = pickle.load(file)  # noqa: S301 - written by this worker's own task
            sys.path[:] = header["path"]
            sys.argv[:] = [header["main"] or ""]
            know_cells(header["cells"])
            function, args, kwargs = CallUnpickler(file, header).load()
        # No context managers around the call: contextlib sets attributes of an exception, and some forbid that.
        begin_process_group(header["process_group"])
        value = function(*args, **kwargs)
        store(value, rank, path_of(folder, RETURNED, rank))
        del function, args, kwargs, value  # see end_process_group
        end_process_group(header["process_group"])
    except (SystemExit, KeyboardInterrupt):
        raise  # an exit code, or a signal
    except BaseException as error:
        data = report_of(error)  # first: a worker that is killed meanwhile leaves no file
        with suppress(OSError), opened(path_of(folder, RAISED, rank)) as file:
            file.write(data)
        raise


def path_of(folder: str, name: str, rank: int) -> str:
    """Return where a rank leaves what it has `RETURNED` or `RAISED`."""
    return os.path.join(folder, VALUES, name.format(rank))


# --- the call ---------------------------------------------------------------------------------


class CallUnpickler(pickle.Unpickler):
    """Finds what was defined in the flow file by importing that file as a module."""

    def __init__(self, file: Any, header: dict[str, Any]) -> None:
        super().__init__(file)
        self._main, self._package = header["main"], header["package"]

    def find_class(self, module: str, name: str) -> Any:
        """Return what `name` of `module` means."""
        if module == "__main__" and self._main is not None:
            main, self._main = self._main, None
            import_main(main, self._package)
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            if module != "__main__":
                raise
            raise AttributeError(
                f"{error}. Each rank imports the file up to where it runs its flow or launches, without what stands under "
                f'if __name__ == "__main__". Define {name} outside of that, and before.'
            ) from None


def import_main(path: str, package: str | None = None) -> None:
    """Import the program of the task as this process's ``__main__``, up to where it would run its flow or launch."""
    module = ModuleType(_MAIN)
    module.__file__, module.__package__ = path, package
    sys.modules[_MAIN] = sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # what `multiprocessing` calls it, if it is imported already
        sys.modules["__mp_main__"] = module
    with open(path, "rb") as file:
        # Without the future imports of this file here, or the flow's annotations would become texts.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    with suppress(ImportError, AttributeError):  # a worker may have another Metaflow than its task
        metaflow = importlib.import_module("metaflow")
        end_import_at(metaflow.FlowSpec, "__init__")
        end_import_at(metaflow.TorchrunSingleNodeMultiGPU, "run")
    with suppress(FlowStarts):
        exec(code, vars(module))  # noqa: S102 - what running the file would do
    rename(module)
    # What is defined from now on says where it comes from as everything else.
    module.__name__ = "__main__"


def end_import_at(cls: Any, name: str) -> None:
    """End the import of a file where it runs its flow, or launches, without ``if __name__ == "__main__"``."""
    method = getattr(cls, name)

    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        if sys.modules["__main__"].__name__ == _MAIN:  # later a function may launch, too
            raise FlowStarts
        return method(self, *args, **options)

    setattr(cls, name, guarded)


def rename(module: ModuleType) -> None:
    """Set `__module__` of all functions and classes of `module` to ``__main__``, as it is in the task and in later steps."""
    stack = list(vars(module).values())
    while stack:
        thing = stack.pop()
        with suppress(Exception):  # no __dict__, a proxy of something that is not there, an attribute that is read only
            # Objects have it of their class; functions and what wraps one have their own.
            if (thing.__module__ if isinstance(thing, FunctionType) else vars(thing)["__module__"]) == _MAIN:
                thing.__module__ = "__main__"
                stack += [getattr(each, "__func__", each) for each in vars(thing).values() if isinstance(thing, type)]


def begin_process_group(process_group: str | None) -> None:
    """Make the process group that was asked for, on this rank's own device."""
    if process_group is None:
        return
    import torch
    import torch.distributed as dist

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % devices)
    if process_group == "auto":  # NCCL wants a device of its own for each rank
        process_group = "nccl" if devices >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
    dist.init_process_group(process_group)


def end_process_group(process_group: str | None) -> None:
    """End the process group that was asked for, if the function has not."""
    if process_group is None:
        return
    import torch.distributed as dist

    # A DistributedDataParallel object that is alive now can abort the interpreter's exit (torch 2.13, gloo).
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


# --- pickling, in the task and here -------------------------------------------------------------

Reducer = Callable[[Any], Any]  # says how to pickle an object, as pickle.Pickler.reducer_override does


def dump(thing: Any, file: Any, reduced: Reducer = lambda thing: NotImplemented) -> None:
    """Pickle `thing`; what the standard library can't carry, cloudpickle may, where it is installed."""
    pickler = (find_cloud_pickler() or _Pickler)(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.reduced = reduced
    pickler.dump(thing)


class _Pickler(pickle.Pickler):
    """Names functions and classes; refuses those of a program that has no file to import them from."""

    reduced: Reducer

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__" and main_file() is None:
            raise pickle.PicklingError(f"{thing.__qualname__} is of this program, which has no file to import it from")
        return self.reduced(thing)


def find_cloud_pickler() -> Any:
    """Return cloudpickle's pickler, None where that is not installed.

    What stands in the program's file goes by name, so that both sides have the same; cloudpickle itself would copy it.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return None

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        reduced: Reducer

        def reducer_override(self, thing: Any) -> Any:
            if is_of_main_file(thing):
                return thing.__qualname__
            if isinstance(thing, CodeType) and (cell := cell_of(thing.co_filename)) is not None:
                make, args = self.dispatch_table[CodeType](thing)
                # cloudpickle 3.1 puts this in the file's place, and older ones leave the file as it is.
                return make, tuple(cell if arg in (_NO_FILE, thing.co_filename) else arg for arg in args)
            result = self.reduced(thing)
            return super().reducer_override(thing) if result is NotImplemented else result

    return CloudPickler


def cell_of(file: str) -> str | None:
    """Return a notebook's name for a cell, such as ``"Cell In[2]"``, by the name of its code's file; None if it is none."""
    with suppress(Exception):  # where IPython has it otherwise (9.0), tracebacks have no lines
        shell = sys.modules["IPython"].get_ipython()
        return " ".join(shell.compile.format_code_name(file))
    return None


def cells() -> dict[str, list[str]]:
    """Return the lines of a notebook's cells, by name."""
    named = ((file, cell_of(file)) for file in list(linecache.cache))
    return {cell: linecache.getlines(file) for file, cell in named if cell is not None}


def know_cells(cells: dict[str, list[str]]) -> None:
    """Have tracebacks show the lines of cells."""
    for name, lines in cells.items():
        linecache.cache[name] = (len("".join(lines)), None, lines, name)  # without a time, nobody looks for a file


def main_file() -> str | None:
    """Return the file of this process's program, the flow; None in a notebook or a shell."""
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


def is_of_main_file(thing: Any) -> bool:
    """Return whether `thing` is a function or class that importing the program's file would give."""
    if not isinstance(thing, (type, FunctionType)) or thing.__module__ != "__main__" or main_file() is None:
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


# --- what comes back --------------------------------------------------------------------------


EVERYWHERE = ("cpu", "meta")  # devices that every process has


def on_cpu(thing: Any) -> Any:
    """Pickle a tensor of a device as one of the CPU, since the reader may have no such device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(thing, torch.Tensor) or thing.device.type in EVERYWHERE:
        return NotImplemented
    here = thing.detach().cpu()
    if isinstance(thing, torch.nn.Parameter):
        here = torch.nn.Parameter(here, requires_grad=thing.requires_grad)
    else:
        here.requires_grad_(thing.requires_grad)
    return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def store(value: Any, rank: int, path: str) -> None:
    """Pickle a value into a file, or raise CantReturn. Its type stands behind the pickle, for who can't load that."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        with opened(path) as file:
            dump(value, file, on_cpu)
            file.write(f"\n{kind}".encode())
    except OSError:
        raise  # the disk's fault
    except Exception as error:
        os.remove(path)
        hint = "" if find_cloud_pickler() else " (cloudpickle, which can carry more, is not installed)"
        text = f"Rank {rank} returned a {kind}, which can't be pickled: {words_of(error)}{hint}"
        raise CantReturn(text) from error


def report_of(error: BaseException) -> bytes:
    """Return an exception pickled for the task or, pickled as well, a sentence why it can't be."""
    file = io.BytesIO()
    try:
        dump(str(error) if isinstance(error, CantReturn) else error, file, on_cpu)
    except Exception as problem:
        file = io.BytesIO(pickle.dumps(f"{words_of(error)} can't be pickled ({words_of(problem)})."))
    return file.getvalue()


def words_of(error: BaseException) -> str:
    """Return type and text of an exception."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def opened(path: str) -> Any:
    """Open a file for writing; the function may have emptied the folder for temporary files, as some do to free disk."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return open(path, "wb")


if __name__ == "__main__":
    main()
