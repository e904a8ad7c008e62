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
import select
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

from .before import PROGRAM_FOLDER, Before
from .spare_process import ACCEPTED, ANSWER_S, Spare, in_words

AGENT_PID = "TORCHRUN_AGENT_PID"
# torchrun starts its workers with this module's `Popen` (torch 2.3 to 2.13: `SubprocessHandler._popen`).
POPEN_OF_WORKERS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# ``worker_hooks/sitecustomize.py`` is in `sys.modules` under this name.
_HOOKS = "torchrun_worker_hooks"


def main() -> list[Any]:
    """Import, wait for a request, and return its program, a function and its arguments; ends the process if it can't."""
    options = json.loads(sys.argv[1])
    hooks = sys.modules.pop(_HOOKS, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    sys.path[0] = PROGRAM_FOLDER
    client = socket.socket(fileno=options["client"])
    before, workers = Before(allows_new=not options.get("preload")), None
    try:
        for name in options["modules"]:
            importlib.import_module(name)
        if "workers" in options:  # not before: on few cores, they would slow down the imports
            is_late = select.select([client], [], [], 0)[0]  # torchrun itself starts workers sooner
            workers = SpareWorkers(0 if is_late else options["workers"], options["of_workers"])
        data, (stdout, stderr), _, _ = socket.recv_fds(client, 1 << 20, 2)  # fails when the parent has closed its end
        request = json.loads(data)
        argv, env = request["argv"], request["env"]
        if env.get(AGENT_PID) == "":  # the first Python of a launch is its agent; see `worker_hooks`
            env[AGENT_PID] = str(os.getpid())
        before.begin(argv, env, request["cwd"])
        run = _program(argv)
        _take_over(request, stdout, stderr)
        if workers is not None:
            workers.serve(request["workers"])
        elif hooks is not None:
            hooks._begin_program()
    except BaseException as error:
        if workers is not None:
            workers.keep(0)
        with suppress(OSError):
            client.send(in_words(error).encode(errors="replace"))
        os._exit(1)
    client.send(ACCEPTED)
    client.close()
    return run


def _take_over(request: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Set argv and output files as in a process that was started cold."""
    sys.orig_argv[:] = argv = request["argv"]
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]
    for own, given in ((1, stdout), (2, stderr)):
        os.write(given, os.pread(own, os.fstat(own).st_size, 0))
        os.dup2(given, own)
        os.close(given)


def _program(argv: Sequence[str]) -> list[Any]:
    """Return the call that runs a script or module in a new main module like the interpreter's (3.10 to 3.14)."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    if argv[2] == "-m":
        import runpy

        run: list[Any] = [runpy._run_module_as_main, (argv[3], True)]  # type: ignore[attr-defined]  # as C code calls it
    else:
        file = os.path.join(os.getcwd(), argv[2])
        loader = SourceFileLoader("__main__", file)
        # Files that can't be read or don't compile (archives, syntax errors) raise here, and so start cold.
        code = compile(loader.get_data(file), file, "exec", dont_inherit=True)
        main_module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
        run = [exec, (code, main_module.__dict__)]
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:  # `multiprocessing` sets it when it is imported
        sys.modules["__mp_main__"] = main_module
    return run


class SpareWorkers:
    """The spare workers of a spare agent."""

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        env = {**os.environ, AGENT_PID: str(os.getpid())}
        self._spares = [Spare("worker", options, env) for _ in range(count)]

    def keep(self, count: int) -> None:
        """End all but `count` spares."""
        for spare in self._spares[count:]:
            spare.kill()
            spare.process.wait()
        del self._spares[count:]

    def serve(self, count: int) -> None:
        """Replace torchrun's `Popen`, so that its `count` workers start from spares, as far as there are any."""
        self.keep(count)
        if not count:
            return
        atexit.register(self.keep, 0)  # ends those that torchrun has not used
        module = importlib.import_module(POPEN_OF_WORKERS)
        # A torch without this name starts its workers in another way. The AttributeError then leads to a cold start.
        start = module.Popen

        def popen(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **options: Any) -> Any:
            request = {"argv": list(args), "env": dict(env), "cwd": os.getcwd()}
            worker = self._become(request, stdout, stderr) if self._spares else None
            return worker or start(args=args, env=env, stdout=stdout, stderr=stderr, **options)

        module.Popen = popen  # type: ignore[attr-defined]
        if len(self._spares) < count:
            sys.stderr.write("A worker starts cold: no spare was ready.\n")

    def _become(self, request: Mapping[str, Any], stdout: Any, stderr: Any) -> Any:
        """Return a spare's process that has become the worker; None, and use no other spare, if it can't."""
        try:
            self._spares[0].ask(request, stdout.fileno(), stderr.fileno())
            self._spares[0].poll(ANSWER_S)
            return self._spares.pop(0).process
        except Exception as error:
            # torchrun's handler of SIGTERM raises this (torch/distributed/elastic/multiprocessing/api.py, 2.13).
            if type(error).__name__ == "SignalException":
                raise
            self.keep(0)
            sys.stderr.write(f"A worker starts cold: {in_words(error)}.\n")
        return None


if __name__ == "__main__":
    _run = main()
    # Called at this level, so that only one frame of ours is below the program's. `pop` drops our reference to the
    # program's module, so that its objects are freed at the same moment as in a cold start.
    _run[0](*_run.pop())
