"""The task's link to its supervisor, which it starts: one socket that keeps packets whole, and no thread.

Our code that waits reads it, in `Link.wait`. While the step's own code runs, the supervisor sends SIGURG until somebody has
read, and the handler reads (`orders`). So there is one reader at any time, and no lock. In a fork of the task nothing works.
"""

from __future__ import annotations

import atexit
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from select import POLLIN, poll
from typing import Any

from ..errors import GangError, TorchrunError
from ..gang.wire import from_plain
from ..machine.packets import MOST_BYTES, Packets, packets
from ..machine.processes import Process
from ..machine.streams import file_of
from ..supervisor.between import start_between

_ANSWER_S = 60.0  # a busy machine, or one whose disk has to read Python first
_LEAVE_WAIT_S = 5.0  # of a control node after its own end, for the others' ends, so that it hears of late failures
_END_S = 2.0
NEVER = float("inf")
_LOOK_S = 0.5  # the longest wait: who shares the socket may have read what tells of an end
_TURN_S = 0.02
_open: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """A connection to a supervisor, which this starts; `handle` and `turn` are set by who uses it.

    Raises GangError where no process can be started. `grace_s` is the workers' time to end, in seconds.
    """

    def __init__(self, grace_s: float) -> None:
        # What stdout and stderr were when this began; the supervisor writes there.
        self.own_files = {name: file_of(fd) for name, fd in (("stdout", 1), ("stderr", 2))}
        self.handle: Callable[[Sequence[Any]], None] = lambda frame: None  # gets what is no answer
        self.turn: Callable[[], None] = lambda: None  # called now and then while our code waits; it may raise
        self.waiter: int | None = None  # the thread in which our code waits
        self.end: str | None = None  # why nothing is said or read any more
        self.last_words: Any = None  # what the supervisor has said at its end
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._packets = Packets()
        self._answers: dict[int, Sequence[Any]] = {}
        self._processes: list[Process] = []  # the supervisor and its parent, when it has said which they are
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:  # a supervisor ends when it hears nothing more
                start_between(theirs.fileno(), grace_s)
        except OSError as error:  # no more processes or files
            raise GangError(
                f"This node's supervisor process could not be started on host {socket.gethostname()}: {error}. Look at "
                "the limits of processes, threads and open files there (ulimit -a)."
            ) from error
        _open.add(self)

    # --- sending; a signal handler may do so

    def send(self, *frame: Any) -> None:
        """Send a frame; dropped if the supervisor is gone. It waits while that takes nothing."""
        for packet in packets(next(self._numbers), frame):
            if self.end is None:
                try:
                    self._socket.send(packet, socket.MSG_NOSIGNAL)
                except OSError:  # who reads next sees why
                    return

    # --- reading

    def read(self) -> None:
        """Handle all that has come."""
        while self.end is None:
            try:
                packet = self._socket.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:  # told first where it has not read all that we said; what it said comes next
                continue
            except OSError as error:
                self._lose(f"the connection to its supervisor process has failed: {error}")
                return
            if not packet:
                pid = self._processes[0].pid if self._processes else "unknown"
                self._lose(f"its supervisor process (pid {pid}) ended unexpectedly, as by SIGKILL")
            elif (frame := self._packets.add(packet)) is not None:
                self._take(frame)

    def _take(self, frame: Sequence[Any]) -> None:
        what, *rest = frame
        if what in ("answer", "failed", "os_error"):
            self._answers[rest[0]] = what, *rest[1:]
        elif what == "supervisor":
            self._processes = [Process(*each) for each in rest]
        elif what == "gone":  # it ends, for a bug of ours
            self._lose(rest[0])
        elif what != "echo":
            self.handle(frame)

    def _lose(self, why: str) -> None:
        self.end = why
        self.handle(["supervisor_lost", why])

    # --- waiting

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Our code waits in here, and reads: handlers of signals set flags."""
        before, own = self.waiter, threading.get_ident()
        while before not in (None, own) and self.end is None:  # another thread is told to leave
            time.sleep(_TURN_S)
            before = self.waiter
        self.waiter = own
        try:
            yield
        finally:
            self.waiter = before

    def wait(self, is_over: Callable[[], object], timeout_s: float) -> bool:
        """Handle what comes until `is_over`, for so long, or until the supervisor is gone; return whether it is over."""
        deadline = time.monotonic() + timeout_s
        with self.ours():
            while True:
                self.read()
                self.turn()
                if is_over():
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self.end is not None:
                    return False
                news = poll()
                news.register(self._socket, POLLIN)
                news.poll(1000 * max(0.0, min(left_s, _LOOK_S)))

    def wake(self) -> None:
        """Have a wait look again; any thread and any handler of a signal may call it."""
        self.send("echo")

    def ask(self, name: str, *args: Any) -> int:
        """Have the supervisor do something; `pop_answer` gets the number that this returns."""
        number = next(self._calls)
        self.send("call", number, name, list(args))
        return number

    def has_answer(self, number: int) -> bool:
        """Return whether an answer has come."""
        return number in self._answers

    def pop_answer(self, number: int) -> Any:
        """Return an answer, once; raise what that has raised."""
        kind, *rest = self._answers.pop(number)
        if kind == "failed":
            raise from_plain(TorchrunError, rest[0], "the error")
        if kind == "os_error":
            raise ConnectionError(rest[0])
        return rest[0]

    def call(self, name: str, *args: Any, patience_s: float = _ANSWER_S) -> Any:
        """Have the supervisor do something, and return its answer; raise what that raises, or GangError."""
        number = self.ask(name, *args)
        if not self.wait(lambda: self.has_answer(number), patience_s):
            raise self.gone(f"its supervisor process gave no answer for {patience_s:g} s")
        return self.pop_answer(number)

    def gone(self, why: str = "") -> GangError:
        """Return the error for a supervisor that is gone, or silent for a reason."""
        return GangError(f"The node can't go on (host {socket.gethostname()}): {self.end or why}.")

    def settle(self, patience_s: float | None = None) -> None:
        """Wait until all lines so far are written, or for so long."""
        with suppress(GangError, OSError):  # it is gone, or silent
            self.call("settle", patience_s, patience_s=_ANSWER_S + (NEVER if patience_s is None else patience_s))

    # --- the end

    def await_end(self, patience_s: float) -> bool:
        """Wait until a supervisor that is gone has left nothing behind, or for so long; return whether that is so."""
        return all(each.wait(patience_s) for each in self._processes)

    def close(self) -> None:
        """End the gang that was begun, and the supervisor."""
        if self.end is None:
            with suppress(GangError, OSError):
                self.last_words = self.call("close", _LEAVE_WAIT_S) or self.last_words
        self.end = self.end or "its gang has ended"
        with suppress(OSError):  # the step's code has closed all descriptors
            self._socket.close()
        if not self.await_end(_END_S):  # it still writes, and its reader may pause: the task's end waits for that
            atexit.register(self.await_end, NEVER)

    def forget(self) -> None:
        """Do nothing any more: this is a fork of the task."""
        self.end = "this process was forked from the task"
        self._socket.close()
        self.handle(["forked"])


def forget_all() -> None:
    """Have a fork of the task forget all links."""
    for each in list(_open):
        each.forget()
