"""A spare: a process that has imported torch and waits for a program to run.

A spare agent becomes torchrun, a spare worker becomes a script or a module. Spare workers are children of the spare
agent, which gives one to torchrun whenever torchrun starts a worker.

This file runs as a program, without our package on its path. A user's module may have any name, so the modules beside
this file are imported in a package that is removed before anything else is imported.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

if __name__ == "__main__":
    __package__ = "torchrun_spare"
    sys.modules[__package__] = types.ModuleType(__package__)
    sys.modules[__package__].__path__ = [os.path.dirname(os.path.abspath(__file__))]

from .imports import Imports, StartCold, in_words
from .spare_workers import AGENT_PID, SpareWorkers

TORCHRUN = "torch.distributed.run"  # what an agent imports
# ``worker_hooks/sitecustomize.py`` is in `sys.modules` under this name.
_HOOKS = "torchrun_worker_hooks"

# A function, and a tuple of its arguments.
Run = list[Any]


def main() -> Run:
    """Import, wait for a request, and return its program; ends the process if no request can come any more."""
    options = json.loads(sys.argv[1])
    is_agent = options["kind"] == "agent"
    if is_agent:
        _end_with_parent()
    hooks = sys.modules.pop(_HOOKS, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    sys.path[0] = folder = os.getcwd()
    client = socket.socket(fileno=options["client"])
    workers = SpareWorkers(options, client) if is_agent else None
    imports = Imports(options["modules"], folder, computes=not is_agent)
    if workers is not None:
        workers.start(has_imported=True)
    request, stdout, stderr = _receive(client)
    try:
        argv, env = request["argv"], request["env"]
        imports.check(argv, env, request["cwd"])
        os.chdir(request["cwd"])  # the script's path may be relative to it
        if workers is not None:
            _begin_agent(workers, request)
        run = _program(argv)
        _take_over(request, stdout, stderr)
        imports.apply(argv, env, request["cwd"])
        if workers is None and hooks is not None:
            hooks._begin_program()
    except BaseException as error:
        with suppress(OSError):
            client.sendall(" ".join(in_words(error).split()).encode(errors="replace") + b"\n")
        os._exit(1)
    client.sendall(b"\n")
    client.close()
    return run


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent ends: see `worker/agent`."""
    with suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)


def _receive(client: socket.socket) -> tuple[dict[str, Any], int, int]:
    """Wait for the request and return it, with files for stdout and stderr. `spare_process` describes the message."""
    data, files, _, _ = socket.recv_fds(client, 1, 3)
    if not data:
        os._exit(0)  # the parent has closed its end: it does not need this spare
    stdout, stderr, told = files
    with open(told, encoding="ascii") as file:
        return json.load(file), stdout, stderr


def _take_over(request: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Set umask, argv and output files as in a process that was started cold."""
    os.umask(request["umask"])
    argv = request["argv"]
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]
    importlib.invalidate_caches()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    for own, given in ((1, stdout), (2, stderr)):
        if _is_kept(own):
            raise StartCold("an import keeps a copy of stdout or stderr, which would go on writing to the spare's")
        written = os.pread(own, os.fstat(own).st_size, 0)
        while written:
            written = written[os.write(given, written) :]
        os.dup2(given, own)
        os.close(given)


def _is_kept(fd: int) -> bool:
    """Return whether another descriptor of this process is open for the same file."""
    for other in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself
            if other > 2 and os.path.sameopenfile(other, fd):
                return True
    return False


def _program(argv: Sequence[str]) -> Run:
    """Return the call that runs a script or module in a new main module like the interpreter's (3.10 to 3.14)."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    if argv[2] == "-m":
        import runpy

        run: Run = [runpy._run_module_as_main, (argv[3], True)]  # type: ignore[attr-defined]  # as C code calls it
    else:
        file = os.path.join(os.getcwd(), argv[2])
        loader = SourceFileLoader("__main__", file)
        if not os.path.isfile(file):
            raise StartCold(f"{file} is not a file")
        # Files that don't compile (archives, syntax errors) raise here, and so start cold.
        code = compile(loader.get_data(file), file, "exec", dont_inherit=True)
        main_module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
        run = [exec, (code, main_module.__dict__)]
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:  # `multiprocessing` sets it when it is imported
        sys.modules["__mp_main__"] = main_module
    return run


def _begin_agent(workers: SpareWorkers, request: dict[str, Any]) -> None:
    """Have the agent start its workers from the spares."""
    workers.keep(request["workers"])
    atexit.register(workers.keep, 0)  # ends those that torchrun has not used
    if request["workers"]:
        workers.serve(request["umask"])
    if request["env"].get(AGENT_PID) == "":  # the first Python of a launch is its agent; see `worker_hooks`
        request["env"][AGENT_PID] = str(os.getpid())


def _hide_first_frame() -> None:
    """Leave the frame of this file out of the traceback that ends the process."""
    show = sys.excepthook

    def shorter(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        error = error.with_traceback(trace and trace.tb_next)
        show(kind, error, error.__traceback__)

    sys.excepthook = shorter


if __name__ == "__main__":
    _run = main()
    try:
        # Called at this level, so that only one frame of ours is below the program's. `pop` drops our reference to the
        # program's module, so that its objects are freed at the same moment as in a cold start.
        _run[0](*_run.pop())
    except SystemExit:
        raise
    except BaseException:
        _hide_first_frame()
        raise
