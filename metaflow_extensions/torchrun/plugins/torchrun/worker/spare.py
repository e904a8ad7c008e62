"""A spare: a process that has imported torch and waits for a program to run.

A spare agent becomes torchrun, a spare worker becomes a script or a module. Spare workers are children of the spare
agent, which gives one to torchrun whenever torchrun starts a worker. A spare refuses if a new process would begin in
another way than it did: with other variables, in another folder, or finding other packages.

This file runs as a program, without our package on its path. A user's module may have any name, so the module beside
this file is imported in a package that is removed before anything else is imported.
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
from importlib.machinery import BuiltinImporter, SourceFileLoader, all_suffixes
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    __package__ = "torchrun_spare"
    sys.modules[__package__] = types.ModuleType(__package__)
    sys.modules[__package__].__path__ = [os.path.dirname(os.path.abspath(__file__))]

from .spare_process import ACCEPTED, ANSWER_S, READ_AT_START, Spare, StartCold, in_words

# torchrun starts its workers with this module's `Popen` (torch 2.3 to 2.13: `SubprocessHandler._popen`).
POPEN_OF_WORKERS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# ``worker_hooks/sitecustomize.py`` is in `sys.modules` under this name.
_HOOKS = "torchrun_worker_hooks"
# Stands in a spare's path for the folder of its program, so that its imports find nothing there.
_PROGRAM_FOLDER = "<the folder of the program>"
_IMPORTABLE = (*all_suffixes(), ".pth", ".dist-info")
# Beginnings of variables that no import reads. We and torchrun set them for a launch (torch 2.13: `_start_workers` in
# elastic/agent/server/local_elastic_agent.py), and NCCL, gloo and torch read theirs when a process group is made.
_OF_LAUNCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCHRUN_", "METAFLOW_TORCHRUN_"),
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_"),
)


def main() -> list[Any]:
    """Import, wait for a request, and return its program, a function and its arguments; ends the process if it can't."""
    options = json.loads(sys.argv[1])
    hooks = sys.modules.pop(_HOOKS, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]
    sys.path[0] = _PROGRAM_FOLDER
    client, workers = socket.socket(fileno=options["client"]), SpareWorkers()
    begun_with, found = dict(os.environ), {entry: _importable(entry) for entry in sys.path[1:]}
    # Python runs the code in ``.pth`` files when it starts: tracers begin there, if a variable says so.
    files = (Path(entry, name) for entry, names in found.items() for name in names if name.endswith(".pth"))
    at_start = "".join(file.read_text("utf-8", "replace") for file in files)
    try:
        for name in options["modules"]:
            importlib.import_module(name)
        if not select.select([client], [], [], 0)[0]:  # else a launch waits already: workers start cold as soon
            workers.begin(
                options.get("workers", 0), options.get("of_workers", {})
            )  # now: they would slow down the imports
        data, (stdout, stderr), _, _ = socket.recv_fds(client, 1 << 20, 2)  # fails when the parent has closed its end
        request = json.loads(data)
        argv = request["argv"]
        _check_packages(found)
        read = READ_AT_START if options.get("allows_new", True) else ""
        _take_variables(begun_with, request["env"], request["cwd"], read, at_start)
        sys.path[sys.path.index(_PROGRAM_FOLDER)] = _folder_of(argv)
        run = _program(argv)
        _take_over(argv, stdout, stderr)
        workers.serve(request.get("workers", 0))
        if hooks is not None:
            hooks.begin_program()
    except BaseException as error:
        workers.keep(0)
        with suppress(OSError):
            client.send(in_words(error).encode(errors="replace"))
        os._exit(1)
    client.send(ACCEPTED)
    client.close()
    return run


# --- whether it begins as a new process would -----------------------------------------------------------


def _check_packages(found: Mapping[str, set[str]]) -> None:
    """Raise `StartCold` if other modules can be imported than before; of the same variables comes the same path."""
    for entry, before in found.items():
        if new := before ^ _importable(entry):
            raise StartCold(f"{os.path.join(entry, min(new))} came or went since torch was imported")


def _take_variables(
    begun_with: Mapping[str, str], env: Mapping[str, str], cwd: str, read: str | tuple[str, ...], at_start: str
) -> None:
    """Set the program's variables, or raise `StartCold` if the folder differs, or one that an import can have read.

    New ones are no reason, but for those that begin as in `read`, or stand in `at_start`: a program may bring its own.
    """
    changed = {name for name in {*env, *begun_with} if env.get(name) != begun_with.get(name)}
    others = (name for name in changed if name in begun_with or name.startswith(read) or name in at_start)
    if names := sorted(name for name in others if not name.startswith(_OF_LAUNCH)):
        raise StartCold(f"{', '.join(names)} had another value when torch was imported")
    if not os.path.samefile(cwd, os.curdir):
        raise StartCold(f"the working directory was {os.getcwd()} when torch was imported")
    for name in changed:
        os.environ.pop(name, None)
    # What imports have set stays, as after a cold start.
    os.environ.update({name: env[name] for name in changed & env.keys()})


def _folder_of(argv: Sequence[str]) -> str:
    """Return the folder in which a program's imports are searched first, or raise `StartCold` if that changes any."""
    if argv[:2] != [sys.executable, "-u"] or (argv[2].startswith("-") and argv[2] != "-m"):
        raise StartCold(f"it runs {' '.join(argv[:3])}, not {sys.executable} -u with a script or a module")
    if "PYTHONSAFEPATH" in os.environ:
        raise StartCold("PYTHONSAFEPATH is set")
    folder = os.getcwd() if argv[2] == "-m" else os.path.dirname(os.path.realpath(argv[2]))
    imported = sys.modules.keys() - {*sys.builtin_module_names, "__main__", "__mp_main__"}
    for name in sorted(_importable(folder)):
        if name.partition(".")[0] in imported:
            raise StartCold(f"{os.path.join(folder, name)} has the name of a module that is imported already")
    return folder


def _importable(folder: str) -> set[str]:
    """Return the names in a folder of what can be imported; its time of change would tell of other files, too."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    packages = {name for name in names if os.path.exists(os.path.join(folder, name, "__init__.py"))}
    return packages | {name for name in names if name.endswith(_IMPORTABLE)}


# --- becoming a program ---------------------------------------------------------------------------------


def _take_over(argv: list[str], stdout: int, stderr: int) -> None:
    """Set argv and output files as in a process that was started cold."""
    sys.orig_argv[:] = argv
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

    def __init__(self) -> None:
        self._spares: list[Spare] = []

    def begin(self, count: int, options: Mapping[str, Any]) -> None:
        """Start so many spares."""
        env = {**os.environ, "TORCHRUN_AGENT_PID": str(os.getpid())}
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
