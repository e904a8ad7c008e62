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

    def serve(self) -> tuple[dict[str, Any], int, int, Leave]:
        """Answer requests until the client is gone, which ends this process; return one in the process it has forked."""
        while True:
            asked = messages.next_request(self._client)
            if asked is None:
                os._exit(0)
            request, stdout, stderr = asked
            reason = self._imports.refuse(request)
            if reason is None:
                try:
                    if (leave := self._fork(request)) is not None:
                        self._client.close()
                        return request, stdout, stderr, leave
                except Exception as error:
                    reason = f"no process could be forked: {messages.in_words(error)}"
            if reason is not None:
                messages.answer(self._client, 0, reason)
            os.close(stdout)
            os.close(stderr)

    def _fork(self, request: dict[str, Any]) -> Leave | None:
        """Fork the process that becomes the program, and tell of it; return in that process the leave that it needs.

        It is a grandchild, whose parent ends at once: so the client adopts it, as if it had started it itself.
        """
        own, of_fork = socket.socketpair()
        between = os.fork()
        if between == 0:
            _leave_to_a_child()
            own.close()
            return Leave(of_fork)
        of_fork.close()
        os.waitpid(between, 0)
        with own, own.makefile("rb") as said:
            pid = int(said.readline() or b"0")
            if pid == 0:
                raise messages.Refused("no process is free")
            if kernel.parent_of(pid) != os.getppid():
                raise messages.Refused("its parent can't adopt it")
            own.sendall(b"!")
            fault = said.readline()
            if fault != b"\n":
                raise messages.Refused(fault.decode(errors="replace").strip() or "it has ended")
            messages.answer(self._client, pid)
            self._tell_of_worker(pid, request["env"])
            own.sendall(b"!")
        return None

    def _tell_of_worker(self, pid: int, env: dict[str, str]) -> None:
        if "RANK" in env and "LOCAL_RANK" in env:
            os.write(self._news, f"{os.getppid()} worker {pid} {env['RANK']} {env['LOCAL_RANK']}\n".encode())


class Leave:
    """Around all that a fork does before it runs as the program: whatever goes wrong there is a refusal, and its end."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._tell(b"%d\n" % os.getpid())  # when it is answered, nobody is left between the two

    def __enter__(self) -> Leave:
        os.setsid()
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self._asked.fileno() != -1:
            fault = "" if error is None else " ".join(messages.in_words(error).split())
            self._tell(f"{fault}\n".encode(errors="replace"))
            self.forget()

    def forget(self) -> None:
        """Be another process than the one that is to become the program."""
        self._asked.close()

    def _tell(self, line: bytes) -> None:
        """Say something, and end if the answer is not to go on, as where nobody waits for it any more."""
        try:
            self._asked.sendall(line)
            if self._asked.recv(1):
                return
        except OSError:
            pass
        os._exit(1)


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
        is_of_agents = True
        while True:
            request, stdout, stderr, leave = Server(client, self._imports, news).serve()
            with leave:
                copy = _copy(request, news) if request["forks_workers"] else None
                if copy is None:
                    if is_of_agents:
                        self._imports.leave_to_workers()
                    return self._become(request, stdout, stderr)
                leave.forget()
                client, is_of_agents = copy, False
            os.close(stdout)
            os.close(stderr)

    def _become(self, request: dict[str, Any], stdout: int, stderr: int) -> program.Run:
        os.close(self._options["news"])
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


def _copy(request: dict[str, Any], news: int) -> socket.socket | None:
    """Make a pristine copy of an agent, to fork its workers from: the agent itself will have threads and sockets.

    Return in the copy the connection to the agent.
    """
    own, client = socket.socketpair()
    if (copy := os.fork()) == 0:
        own.close()
        kernel.die_with_parent(signal.SIGKILL)
        return client
    client.close()
    os.write(news, f"{os.getpid()} copy {copy}\n".encode())
    _fork_workers_of_torchrun(own, request["worker_env"])
    return None


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
