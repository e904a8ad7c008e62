"""How a forked process becomes a program: the same as one that was started with the same words.

The interpreter's own C code runs it, as it would after a start. So its main module, its way to end and what it prints
of an exception are the interpreter's, and no frame of ours is below its own.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from . import kernel
from .search_path import first_entry

# What runs, as a function and its arguments.
Run = tuple[Callable[..., Any], tuple[Any, ...]]
_OURS = __package__


def become(request: Mapping[str, Any], stdout: int, stderr: int, run_module: Callable[..., Any]) -> Run:
    """Make this process the one that `request` describes; return what the interpreter is to run."""
    argv, env = request["argv"], request["env"]
    _take_output(stdout, stderr)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    _take_environment(env)
    if request["dies_with_parent"]:
        kernel.die_with_parent(signal.SIGTERM)
    _be_alone()
    kernel.show_as(argv, env)
    _take_words(argv)
    _renew_main()
    for name in [name for name in sys.modules if name == _OURS or name.startswith(f"{_OURS}.")]:
        del sys.modules[name]
    program = argv[2:]
    return (run_module, (program[1], True)) if program[0] == "-m" else _script(program[0])


def _take_output(stdout: int, stderr: int) -> None:
    """Begin with what the imports have written, since a program that imports the same would have written it."""
    for own, given in ((1, stdout), (2, stderr)):
        written = os.pread(own, os.fstat(own).st_size, 0)
        while written:
            written = written[os.write(given, written) :]
        os.dup2(given, own)
        os.close(given)


def _take_environment(env: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _be_alone() -> None:
    """Share nothing with the other processes of this fork that separate programs would not share.

    `random` and `tempfile` see to it themselves.
    """
    if (generator := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        generator.seed()  # every process begins with another seed, the system's (2.13); `torch.seed` minds GPUs, too
    if (logging := cast("Any", sys.modules.get("logging"))) is not None:  # times of records count from there
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # Python 3.13
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (process := cast("Any", sys.modules.get("multiprocessing.process"))) is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
    if (threading := cast("Any", sys.modules.get("threading"))) is not None:
        threading.main_thread()._set_native_id()  # `fork` does not (Python 3.11)


def _take_words(argv: Sequence[str]) -> None:
    program = argv[2:]
    sys.orig_argv[:] = argv
    if program[0] == "-m":
        sys.argv[:] = ["-m", *program[2:]]
    else:
        sys.argv[:] = program
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = first_entry(argv, os.getcwd())


def _renew_main() -> None:
    """Give the program a main module of its own, as `add_main_module` of Python's pylifecycle.c makes it (3.10 to 3.13)."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __loader__=importlib.machinery.BuiltinImporter)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # `multiprocessing` sets it when it is imported
        sys.modules["__mp_main__"] = main


def _script(path: str) -> Run:
    """Return what runs a script, as ``python path`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fopen.restype = ctypes.c_void_p
    # The interpreter makes this path absolute, and does nothing else with it (pymain_run_file, 3.10 to 3.13).
    name = os.fsencode(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    file = libc.fopen(name, b"rb")
    if not file:
        error = ctypes.get_errno()
        sys.stderr.write(
            f"{sys.executable}: can't open file {os.fsdecode(name)!r}: [Errno {error}] {os.strerror(error)}\n"
        )
        os._exit(2)
    words = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
    run_file = ctypes.PYFUNCTYPE(ctypes.c_int, *words)(("PyRun_AnyFileExFlags", ctypes.pythonapi))
    run_file.errcheck = _exit_if_failed  # type: ignore[assignment]
    return run_file, (file, name, 1, None)


def _exit_if_failed(failed: int, *_: Any) -> int:
    if failed:  # the exception is printed already
        raise SystemExit(1)
    return failed
