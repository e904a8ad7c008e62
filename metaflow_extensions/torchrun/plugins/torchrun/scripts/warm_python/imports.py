"""What a warm process has imported beforehand, and whether a program could tell.

The imports run in a thread of their own, with low priority, so that the step's own code is not slowed. That
thread is gone before the first fork.
"""

from __future__ import annotations

import atexit
import importlib
import os
import stat
import sys
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from . import search_path

AGENT = "torch.distributed.run"
# Its `Popen` is what torchrun starts its workers with (torch 2.3 to 2.13: `SubprocessHandler._popen`).
POPEN_OF_WORKERS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Nice values, of the importing thread alone (Linux: setpriority(2), C library/kernel differences). Who may not raise its
# priority again gets a third of the time beside others, so that a launch does not wait for it too long.
_LOWEST, _LOWER = 19, 5
# What an interpreter, the loader of libraries or a C library reads when it is loaded; what Python code reads is
# recorded. Taken from the calls of getenv(3) while torch 2.13 (CPU build) is imported, and the families of those.
_READ_BY_C = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "HOME", "OPENSSL_", "SSL_"),
    *("TORCH_", "PYTORCH_", "C10_", "ATEN_", "KINETO_", "GLOG_", "NPY_", "NUMPY_", "GFORTRAN_", "INTEL_"),
)
# Only who computes cares for these. An agent does not, and gives them to workers that it starts as programs.
_READ_TO_COMPUTE = (
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ACC_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_", "HSA_", "XLA_", "NEURON_", "HABANA_", "I_MPI_"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
# A module that goes through all variables when it is imported, and the beginning of those that it wants. torch imports
# tqdm where it is installed (torch/hub.py, 2.13), and most frameworks install it (`envwrap` in tqdm/utils.py, 4.70).
_WANTED_BY = {"tqdm.utils": "TQDM_"}
# torch reads these when a process group is made (ProcessGroupNCCL.hpp, 2.13).
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_")
_LOOKS_UP = ("os", "_collections_abc", "collections.abc")  # the last is what Python's `_collections_abc` calls itself
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/neuron")


class Imports:
    """What this process imports; what its environment is read for is noted from now on."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._began_with = dict(os.environ)
        self._read: set[bytes] = set()  # names of variables that Python code has looked up
        self._files: dict[str, tuple[int, int]] = {}  # file of a module -> its time of change and size
        self._for_workers = ExitHandlers()
        self._fault: str | None = None  # why no program may be started here at all
        os.environ._data = _Recording(os.environ._data, self._read)  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._import_all, name="torchrun-imports", daemon=True)
        self._done, self._importing = os.pipe()

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    @property
    def done_file(self) -> int:
        """A file that becomes readable when all is imported."""
        return self._done

    def hurry(self) -> None:
        """Import with this thread's own priority, where the system lets."""
        with suppress(OSError):  # without CAP_SYS_NICE, or the thread can be gone
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, os.getpriority(os.PRIO_PROCESS, 0))

    def finish(self) -> None:
        """Wait for the end of the imports, and look at what they have left."""
        self._thread.join()
        os.close(self._done)
        os.environ._data = os.environb._data = dict(os.environ._data)  # type: ignore[attr-defined]
        self._files = dict(_files_of_modules())
        self._fault = self._fault or _threads_left() or _device_in_use() or _watched()

    def _import_all(self) -> None:
        lower_priority()
        try:
            for name in self._modules:
                with nullcontext() if name == AGENT else self._for_workers:
                    importlib.import_module(name)
        except BaseException as error:
            self._fault = f"{name} could not be imported: {type(error).__name__}: {error}"
        finally:
            _forget(AGENT)
            os.close(self._importing)

    def leave_to_workers(self) -> None:
        """Be an agent: what was imported for workers does nothing at its end."""
        self._for_workers.forget()

    def refuse(self, request: Mapping[str, Any]) -> str | None:
        """Return why the program that is asked for could tell that it was not started as ever, or None."""
        return (
            self._fault
            or _refuse_command(request["argv"], request["cwd"])
            or self._refuse_environment(request["env"], request["computes"])
            or (_refuse_torch() if request["forks_workers"] else None)
            or self._refuse_changes()
            or search_path.refuse(search_path.first_entry(request["argv"], request["cwd"]))
        )

    def _refuse_environment(self, env: Mapping[str, str], computes: bool) -> str | None:
        """Look for variables that count when a module is imported, and had another value then."""
        before = self._began_with
        others = (name for name in sorted({*env, *before}) if env.get(name) != before.get(name))
        differing = [name for name in others if self._counts(name, computes)]
        return f"{', '.join(differing)} had another value when torch was imported" if differing else None

    def _counts(self, name: str, computes: bool) -> bool:
        if name.startswith(_READ_LATER):
            return False
        if name.startswith(_READ_TO_COMPUTE):
            return computes
        return os.fsencode(name) in self._read or name.startswith((*_READ_BY_C, *_WANTED_BY.values()))

    def _refuse_changes(self) -> str | None:
        changed = [file for file, known in self._files.items() if _version(file) != known]
        return f"{changed[0]} has changed since it was imported" if changed else None


class ExitHandlers:
    """What modules have arranged while they were imported, to be done at the end of the process or at an error.

    Trackers end their runs so, and an agent has none. Handlers of the standard library serve the agent, too.
    """

    def __init__(self) -> None:
        self._added: list[Callable[..., Any]] = []
        self._finalizers: set[Any] = set()
        self._hooks: dict[tuple[Any, str], Any] = {}

    def __enter__(self) -> None:
        self._register, self._before = atexit.register, set(_finalizers())
        self._hooks = {place: getattr(*place) for place in _HOOKS} | self._hooks
        atexit.register = self._note  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        atexit.register = self._register
        self._finalizers |= set(_finalizers()) - self._before

    def _note(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if str(getattr(function, "__module__", "")).partition(".")[0] not in sys.stdlib_module_names:
            self._added.append(function)
        return self._register(function, *args, **kwargs)

    def forget(self) -> None:
        """Have none of it done in this process."""
        for function in self._added:
            atexit.unregister(function)
        for finalizer in self._finalizers:
            finalizer.atexit = False
        for (module, name), hook in self._hooks.items():
            setattr(module, name, hook)


_HOOKS = ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook"))


def _finalizers() -> Iterable[Any]:
    """Return the `weakref.finalize` that are there; they are kept by its own code only (Python 3.10 to 3.14)."""
    return list(getattr(weakref.finalize, "_registry", ()))


def lower_priority() -> None:
    """Leave the processor to others; as far as `Imports.hurry` can take it back."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, min(own + 1, _LOWEST))
    try:
        os.setpriority(os.PRIO_PROCESS, 0, own)
        lowest = _LOWEST
    except OSError:  # without CAP_SYS_NICE
        lowest = min(own + _LOWER, _LOWEST)
    os.setpriority(os.PRIO_PROCESS, 0, lowest)


class _Recording(dict[bytes, bytes]):
    """The data of `os.environ`, which notes what is looked up."""

    def __init__(self, data: Mapping[bytes, bytes], read: set[bytes]) -> None:
        super().__init__(data)
        self._read = read

    def __getitem__(self, name: bytes) -> bytes:
        if _reader() not in _WANTED_BY:
            self._read.add(name)
        return super().__getitem__(name)


def _reader() -> str | None:
    """Return the module whose code looks a variable up, however it does."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _LOOKS_UP:
        frame = frame.f_back
    name: str | None = frame.f_globals.get("__name__")
    return name


def _forget(module: str) -> None:
    """Let `module` be run as a program: as such it is imported under another name."""
    if sys.modules.pop(module, None) is not None:
        parent, _, name = module.rpartition(".")
        delattr(sys.modules[parent], name)


def _files_of_modules() -> Iterator[tuple[str, tuple[int, int]]]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (version := _version(file)) is not None:
            yield file, version


def _version(file: str) -> tuple[int, int] | None:
    try:
        now = os.stat(file)
    except OSError:  # torch has modules whose `__file__` names no file
        return None
    return now.st_mtime_ns, now.st_size


def _threads_left() -> str | None:
    """Return whose threads a fork would lose.

    Some libraries end theirs before a fork and start them again when they need them, as OpenBLAS does
    (pthread_atfork). So these are counted after a first fork.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 1.0
    while len(left := os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # one that has ended can be seen for a moment
    return f"what it has imported runs {len(left) - 1} threads" if len(left) > 1 else None


def _device_in_use() -> str | None:
    for name in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if file.startswith(_DEVICES):
            return f"what it has imported uses {file}"
    return None


def _watched() -> str | None:
    """Return what watches this process: it would go on in each fork, without knowing."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    if sys.gettrace() or sys.getprofile() or (monitoring and any(map(monitoring.get_tool, range(6)))):
        return "a tracer or profiler follows it"
    return None


def _refuse_torch() -> str | None:
    try:
        module = importlib.import_module(POPEN_OF_WORKERS)
    except ImportError:
        return "this torch starts its workers in another way"
    return None if hasattr(module, "Popen") else "this torch starts its workers in another way"


def _refuse_command(argv: Sequence[str], cwd: str) -> str | None:
    program = argv[2:]
    if argv[0] != sys.executable:
        return f"{argv[0]} is another program than {sys.executable}"
    if argv[1:2] != ["-u"] or not program or (program[0].startswith("-") and program[0] != "-m"):
        return "the interpreter has other options"
    if program[0] != "-m":
        try:
            if not stat.S_ISREG(os.stat(os.path.join(cwd, program[0])).st_mode):
                return f"{program[0]} is not a file"
            os.close(os.open(os.path.join(cwd, program[0]), os.O_RDONLY))
            if zipfile.is_zipfile(os.path.join(cwd, program[0])):  # Python looks for a module in it
                return f"{program[0]} is an archive"
        except OSError as error:
            return str(error)
    relative = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not os.path.isabs(entry)]
    if relative and "PYTHONPATH" in os.environ and cwd != os.getcwd():
        return "PYTHONPATH has relative entries, and the working directory is another"
    return None
