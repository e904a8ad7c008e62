"""The supervisor: a process beside a task, which runs the node's launches and holds its end of the gang.

It goes on whatever the step's own code does: that may keep the task's interpreter for minutes, stop it, or fork. It sees
the task end, reads how, and tells the gang. It runs without Metaflow and without site-packages, in one asyncio loop;
one other thread writes to stdout and stderr (`output`). `between` is its parent. `task/link` is its counterpart.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from ..compat import linux
from ..errors import TorchrunError
from ..events import Event
from ..gang.messages import CONTROL, Abort, Farewell, Leave, from_wire
from ..gang.wire import to_plain
from ..machine import processes
from .control_side import ControlSide
from .endings import MustEnd
from .ends import WATCH_S, Held, end_of, until_look
from .launches import Launches
from .member_side import MemberSide
from .output import Output
from .signs import Signs
from .task_link import TaskLink
from .warm import begin_spares
from .workers import MachineFaults

_LAST_LINES_S = 0.5  # for what the workers have written before the task's end
_DYING_S = 5.0  # a task that is killed closes its files first, and then frees its memory
_OF_LAUNCHES = frozenset({"run", "complete", "give_up", "end_spares"})
_URGENT = frozenset({"lost", "must_end"})  # the step's own code hears of it
_URGENT_MESSAGES = frozenset({Abort.__name__.lower(), Farewell.__name__.lower()})


def main(between: int) -> int:
    """Serve one task, until it lets go or is gone; `between` is the pid of this process's parent, which may be gone, too."""
    pid, began = sys.argv[1:]
    linux.adopt_orphans()
    task, link = processes.Process(int(pid), began), socket.socket(fileno=os.dup(0))
    loop = asyncio.SelectorEventLoop()
    asyncio.set_event_loop(loop)
    # The loop is never closed: that would wait for threads in which names are looked up. The process ends anyway.
    loop.run_until_complete(Supervisor(task, link, between).run())
    return 0


class Supervisor:
    """Serves one task. Everything in this process runs in one loop."""

    def __init__(self, task: processes.Process, own: socket.socket, between: int) -> None:
        self._task, self._between = task, between
        self._is_over = asyncio.Event()  # the task lets go, is gone, or can't be served any more
        self._is_released = False  # the task lets go
        self._why: str | None = None  # why the task can't be served any more, although it may live
        self._link = TaskLink(own, task.pid, self._handle, self._is_over.set)
        self._output = Output(self._link.send)
        self._side: ControlSide | MemberSide | None = None  # from *begin* on, as are the next two
        self._launches: Launches | None = None
        self._signs: Signs | None = None
        self._calls = Held()
        # Since one to two seconds ago: of a worker that was killed long ago the task's end does not come.
        self._faults = [MachineFaults()] * 2
        self._faults_at = 0.0

    async def run(self) -> None:
        """Do all that the task asks, until its end."""
        asyncio.get_running_loop().set_exception_handler(self._on_bug)
        self._link.open()
        self._link.send("supervisor", *((pid, processes.began(pid)) for pid in (os.getpid(), self._between)))
        self._calls.begin(self._follow_task())
        self._look()
        await self._is_over.wait()
        await self._link.flush(lambda: self._task.has_ended)
        if self._is_released:
            if self._launches is not None:
                await self._launches.close()
            # All lines are written, as long as the task waits; or, in a hurry, until their reader takes nothing.
            while not (await self._output.settle(WATCH_S) or self._task.has_ended or self._output.has_given_up):
                pass
            return
        if self._why is None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(end_of(self._task), _DYING_S)
            self._link.read_rest()  # its last words may be a *leave*
            self._why = self._how_it_ended()
        await self._tell_end(self._why)

    async def _follow_task(self) -> None:
        await end_of(self._task)
        self._is_over.set()

    def _look(self) -> None:
        """Look at what no event tells; it repeats itself."""
        asyncio.get_running_loop().call_later(until_look(), self._look)
        if self._launches is None or not self._launches.runs:
            for _ in processes.reap():
                pass
        if not self._is_over.is_set() and (now := time.monotonic()) > self._faults_at + 1.0:
            self._faults, self._faults_at = [self._faults[1], MachineFaults()], now

    # --- bugs of ours

    def _on_bug(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """Handle an exception that nobody else has handled."""
        error = about.get("exception")
        if error is None or "socket" in about:  # no free file for a new connection: asyncio tries again
            return
        (self._fail if self._side is None else self._side.fail)(error)

    def _fail(self, error: BaseException) -> None:
        """Serve this task no more; it hears so."""
        if self._why is None:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._why = f"its supervisor process has failed, which is a bug in metaflow-torchrun:\n{text}"
            self._link.send_now("gone", self._why)
            self._is_over.set()

    # --- what the task asks

    def _handle(self, frame: list[Any]) -> None:
        try:
            self._do(*frame)
        except Exception as error:
            self._fail(error)

    def _do(self, what: str, *rest: Any) -> None:
        if what == "begin":
            self._begin(*rest)
        elif what == "echo":
            self._link.send_now("echo")  # the wait may have ended meanwhile
        elif what == "hurry":  # the task was told to end: nobody waits for a reader that takes nothing
            self._output.is_hurried = True
        elif what == "call":
            self._calls.begin(self._answer(*rest))
        elif self._side is None or self._launches is None:
            pass  # a thread of the task has said it before the gang begins
        elif what == "send":
            self._side.send(from_wire(rest[0]))
        elif what == "show":
            self._output.show(Event(*rest))
        elif what == "wrote":
            self._output.wrote(*rest)
        elif what == "interrupt":
            self._side.inbox.put_nowait(MustEnd(*rest))
        else:
            getattr(self._launches if what in _OF_LAUNCHES else self._side, what)(*rest)

    def _begin(self, about: dict[str, Any]) -> None:
        self._output.num_nodes = about["num_nodes"]
        more = about.pop("more")
        self._side = (ControlSide if "rules" in about else MemberSide)(self._tell_task, self._output, **about)
        self._launches = Launches(self._side, self._output, begin_spares(more.get("starts")))
        if signs := more.get("signs"):
            self._signs = Signs(self._task, signs, self._side)

    def _tell_task(self, what: str, *rest: Any) -> None:
        """Tell the task something of its gang; at once if the step's own code must hear of it."""
        is_urgent = what in _URGENT or (what == "deliver" and rest[0]["type"] in _URGENT_MESSAGES)
        (self._link.send_now if is_urgent else self._link.send)(what, *rest)

    async def _answer(self, number: int, name: str, args: list[Any]) -> None:
        """Answer a question, at once or as soon as the answer is known."""
        link = self._link
        try:
            asked = self._output if name == "settle" else self._side
            found = None if asked is None else getattr(asked, name)(*args)  # None: the gang was not begun
            link.send("answer", number, await found if inspect.isawaitable(found) else found)
        except TorchrunError as error:
            link.send("failed", number, to_plain(error))
        except OSError as error:
            link.send("os_error", number, str(error))
        except BaseException as error:  # a bug of ours: the task must not wait for ever
            link.send("os_error", number, f"{type(error).__name__}: {error}")
        if name == "close":  # the task lets go
            if self._launches is not None:
                self._launches.abort()
            self._is_released = True
            self._is_over.set()

    # --- the task's end

    async def _tell_end(self, how: str) -> None:
        """Tell the gang how the task has ended, and let the gang come to its end."""
        if self._signs is not None:
            self._signs.close()
        if self._side is None or self._launches is None:
            return
        self._side.send(Leave("killed", text=how))
        self._launches.abort()
        await self._output.settle(_LAST_LINES_S)
        for stream in (1, 2):  # who reads the task's output waits for the end of that
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self._side.node == CONTROL:
            await self._side.end()
            await self._launches.close()
        else:  # its connection lasts until its workers have ended: their ranks may be another node's then
            await self._launches.close()
            await self._side.end()

    def _how_it_ended(self) -> str:
        if not self._task.has_ended:
            return "its task has closed the connection to its supervisor process"
        task = self._task.now()
        status = None if task is None else task.status
        # None: somebody has reaped it already, as a container's shell does.
        if status is None and not self._faults[0].is_out_of_memory(-signal.SIGKILL):
            return "its task ended unexpectedly; its exit code could not be read any more"
        return f"its task {self._faults[0].how_ended(-signal.SIGKILL if status is None else status)}"
