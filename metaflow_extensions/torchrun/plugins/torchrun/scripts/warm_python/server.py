"""What a warm process does: it imports, waits, and forks a process that becomes a program when somebody asks for it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from . import kernel, messages, program
from .imports import POPEN_OF_WORKERS, Imports
from .popen import worker_popen

_CALL = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_void_p)


class Server:
    """Waits for requests of its parent, which becomes the parent of the programs, too; nothing here returns but forks."""

    def __init__(self, client: socket.socket, imports: Imports, news: int) -> None:
        self._client = client
        self._imports = imports
        self._news = news  # where the guardian hears of workers

    def serve(self) -> tuple[dict[str, Any], int, int]:
        """Answer requests until the client is gone, which ends this process; return one in the process it has forked."""
        while True:
            asked = messages.next_request(self._client)
            if asked is None:
                os._exit(0)
            request, stdout, stderr = asked
            reason = self._imports.refuse(request)
            if reason is None:
                try:
                    if self._fork(request) == 0:
                        self._client.close()
                        return asked
                except OSError as error:
                    reason = f"no process could be forked: {error}"
            if reason is not None:
                messages.answer(self._client, 0, reason)
            os.close(stdout)
            os.close(stderr)

    def _fork(self, request: dict[str, Any]) -> int:
        """Fork the process that becomes the program, and return its pid; 0 in itself.

        It is a grandchild, whose parent ends at once: so the client adopts it, as if it had started it itself.
        """
        begin, may_begin = os.pipe()
        pid_file, tell_pid = os.pipe()
        between = os.fork()
        if between == 0:
            _leave_to_a_child()
            os.close(pid_file)
            os.close(may_begin)
            os.setsid()
            os.write(tell_pid, b"%d" % os.getpid())
            os.close(tell_pid)
            if not os.read(begin, 1):  # nobody waits for it any more
                os._exit(1)
            os.close(begin)
            return 0
        os.waitpid(between, 0)
        os.close(tell_pid)
        os.close(begin)
        try:
            pid = int(os.read(pid_file, 32) or b"0")
            if pid == 0:
                raise OSError("no process is free")
            if kernel.parent_of(pid) != os.getppid():
                raise OSError("its parent can't adopt it")
            messages.answer(self._client, pid)
            self._tell_of_worker(pid, request["env"])
            os.write(may_begin, b"!")
            return pid
        finally:
            os.close(pid_file)
            os.close(may_begin)

    def _tell_of_worker(self, pid: int, env: dict[str, str]) -> None:
        if "RANK" in env and "LOCAL_RANK" in env:
            os.write(self._news, f"{os.getppid()} worker {pid} {env['RANK']} {env['LOCAL_RANK']}\n".encode())


def _leave_to_a_child() -> None:
    """Go on in a child, and end."""
    try:
        if os.fork() == 0:
            return
    except OSError:
        pass
    os._exit(0)


class _Next:
    """Waits for a program; ctypes asks it for the function to call. See `install`."""

    def __init__(self, options: dict[str, Any], begin_program: Callable[[], None]) -> None:
        self._options = options
        self._begin_program = begin_program
        self._imports = Imports(options["modules"])
        self._run_module = runpy._run_module_as_main  # type: ignore[attr-defined]
        self._arguments: tuple[Any, ...] = ()

    def function(self, _: object) -> ctypes.py_object[Any]:
        """Return what this process runs after all, once it is a fork that becomes a program."""
        function, self._arguments = self._next_program()
        return ctypes.py_object(function)

    def arguments(self, _: object) -> ctypes.py_object[Any]:
        """Return the arguments of that function."""
        return ctypes.py_object(self._arguments)

    def _next_program(self) -> program.Run:
        news, client = self._options["news"], socket.socket(fileno=self._options["client"])
        self._import_while_waiting(client)
        while True:
            request, stdout, stderr = Server(client, self._imports, news).serve()
            if not request["forks_workers"]:
                break
            own, client = socket.socketpair()
            if (copy := os.fork()) != 0:
                os.write(news, f"{os.getpid()} copy {copy}\n".encode())
                client.close()
                _fork_workers_of_torchrun(own, request["worker_env"])
                break
            # A pristine copy of the agent, to fork its workers from: the agent itself will have threads and sockets.
            own.close()
            kernel.die_with_parent(signal.SIGKILL)
            os.close(stdout)
            os.close(stderr)
        os.close(news)
        run = program.become(request, stdout, stderr, self._run_module)
        runpy._run_module_as_main = self._run_module  # type: ignore[attr-defined]
        self._begin_program()
        return run

    def _import_while_waiting(self, client: socket.socket) -> None:
        imports = self._imports
        imports.start()
        ready, _, _ = select.select([client.fileno(), imports.done_file], [], [])
        if imports.done_file not in ready:
            imports.hurry()  # somebody waits for it
        imports.finish()
        # What is there for good is not looked at by each of the forks, and so not copied.
        gc.freeze()


def _fork_workers_of_torchrun(server: socket.socket, env: dict[str, str]) -> None:
    """Have torchrun start its workers by a fork."""
    module: Any = importlib.import_module(POPEN_OF_WORKERS)
    module.Popen = worker_popen(server, env)


def install(options: str, begin_program: Callable[[], None]) -> None:
    """Have the interpreter call us when it is about to run its main module, instead of doing that.

    This process was started as ``python -m``, so C code calls `runpy._run_module_as_main` (pymain_run_module, 3.10 to
    3.13). It finds a C function there, `PyObject_Call`. Before ctypes calls that, it has us convert the arguments,
    which is when we import, wait and fork. When these have returned, no frame of Python code is left, and
    `PyObject_Call` runs the program.

    `begin_program` is called in each program's process when its environment is there.
    """
    following = _Next(json.loads(options), begin_program)
    function = type("Function", (), {"from_param": following.function})
    arguments = type("Arguments", (), {"from_param": following.arguments})
    call = _CALL(("PyObject_Call", ctypes.pythonapi), ((1, "function"), (1, "arguments"), (1, "keywords", None)))
    call.argtypes = [function, arguments, ctypes.c_void_p]
    runpy._run_module_as_main = call  # type: ignore[attr-defined]
    sys.argv[:] = sys.argv[:1]
