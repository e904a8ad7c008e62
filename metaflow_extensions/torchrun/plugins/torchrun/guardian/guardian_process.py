"""A guardian as its task sees it: start it, send commands, read events."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ..machine.detached import beside_task
from .agent_events import CONFIRMED, AgentEvent, End, from_line

# How long a guardian may take to confirm a request. A frozen one never does. Meanwhile the launch hears of no SIGTERM.
_ANSWER_S = 5.0
_LOOK_S = 0.5  # between checks whether a silent guardian still lives, without a pidfd
_CONTINUE_S = 5.0  # between continuing a silent guardian, which somebody may have stopped


class GuardianProcess:
    """A process that runs `main` of a module of this package; one thread at a time may ask for its events.

    It is no child of the task, whose step may wait for all its children.
    """

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        # A socket, since sending on one whose other end is closed need not raise SIGPIPE, which could end the task.
        self._commands, theirs = socket.socketpair()
        with theirs:
            self._process = beside_task(module, words, env, theirs.fileno())

    @property
    def pid(self) -> int:
        """Its pid; all processes of a launch descend from it."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self._process.has_ended

    def tell(self, line: str) -> None:
        """Send a command, unless the guardian has ended.

        One that somebody has stopped (SIGSTOP) is continued.
        """
        self._continue()
        with suppress(OSError):
            self._commands.sendall(f"{line}\n".encode(), socket.MSG_NOSIGNAL)

    def _continue(self) -> None:
        """Continue a guardian that somebody has stopped: else it and all below it would outlive the task.

        A process that runs does not notice this.
        """
        self._process.send_signal(signal.SIGCONT)

    def ask(self, request: bytes) -> bool:
        """Send a request of any length, before any command; return whether the guardian has confirmed it."""
        give_up_at = time.monotonic() + _ANSWER_S
        self._commands.settimeout(_ANSWER_S)
        try:
            with suppress(OSError):  # it has ended, or its time is up
                self._commands.sendall(len(request).to_bytes(8, "big") + request, socket.MSG_NOSIGNAL)
                self._commands.settimeout(max(0.1, give_up_at - time.monotonic()))
                return self._commands.recv(1) == CONFIRMED
            return False
        finally:
            self._commands.settimeout(None)

    def events(self) -> Iterator[AgentEvent]:
        """Yield its events of one agent up to `End` or its own end.

        The pipe's end of file is not enough: a process that the step's code has forked can hold it open.
        """
        for line in self._lines():
            event = from_line(line)
            yield event
            if isinstance(event, End):
                return

    def _lines(self) -> Iterator[bytes]:
        events, rest = self._process.output.fileno(), b""
        with self._process.end() as end:
            poll = select.poll()
            for each in (events,) if end is None else (events, end):
                poll.register(each, select.POLLIN)
            while True:
                # Checked before the pipe is read: a guardian that is gone has written all its events by now.
                gone = not self.is_alive
                ready = dict(poll.poll(0 if gone else 1000 * (_LOOK_S if end is None else _CONTINUE_S)))
                if not ready and not gone:
                    self._continue()
                if events in ready:
                    data = os.read(events, 65536)
                    *lines, rest = (rest + data).split(b"\n")
                    yield from lines
                    gone = not data
                if gone:
                    return

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, or so long; return whether it has ended."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it by SIGKILL, and wait for that; the kernel may keep a process that waits for a disk."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_ANSWER_S)

    def close(self) -> None:
        """Close the connection; a guardian that still runs then ends what it has started, and itself."""
        self._continue()
        with suppress(OSError):
            self._commands.shutdown(socket.SHUT_RDWR)  # also where the step has forked a process that holds it open
        self._commands.close()
