"""The supervisor: a process beside a task, which holds the gang's channel and, on the control node, the gang.

It answers the other nodes whatever the step's own code does: that may keep the task's interpreter for minutes, stop it,
or fork. It sees the task end, reads how, and tells the gang. It runs without Metaflow and without site-packages.
`channel/client` is its counterpart in the task; `channel/link` carries what they say.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from socket import socket
from typing import Any

from .channel.control_channel import ControlChannel
from .channel.link import LinkEnd
from .channel.member_channel import MemberChannel
from .errors import TorchrunError
from .features.listed import FEATURES
from .gang.cause import describe_exit
from .gang.nodes import NodeState
from .gang.policy import ConnectPolicy, Rules
from .gang.protocol import Busy, Lines, Message, TaskEnded, from_wire, to_wire
from .gang.state import Gang
from .gang.wire import to_plain
from .machine import processes
from .machine.cgroup import describe_oom, oom_kills
from .machine.frozen import STOPPED, WATCH_S, FrozenWatch, is_stopped_with_parent
from .machine.network import pick_port
from .machine.pods import why_it_waits
from .node.watchers import keepers_of
from .records.snapshot import snapshot_of

_ASK_S, _BUSY_S = 1.0, 3.0  # between two questions to the task; with no answer for so long it is busy
_DYING_S = 5.0  # a task that is killed closes its files first, and then frees its memory
_LONG = frozenset({"connect", "close"})  # calls that take their time; the task may end meanwhile
_UNREAD_FRAMES = 1000  # so many wait for a task whose code keeps it busy; then lines of other nodes are left out


def main() -> int:
    """Serve one task, until it lets go or is gone."""
    pid, began = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the task's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so is an order to all processes of a container
    Supervisor(processes.Other(int(pid), began), LinkEnd(socket(fileno=os.dup(0)))).run()
    return 0


class Supervisor:
    """Serves one task. The main thread reads the link, and looks at the task; the channel has a thread of its own."""

    def __init__(self, task: processes.Other, link: LinkEnd) -> None:
        self._task, self._link = task, link
        self._end: int | None = None  # the file that tells the task's end, if one does
        self._side: _Side | None = None
        self._silence_s = 0.0  # heartbeat_timeout_s
        self._frozen: FrozenWatch | None = None  # of the task, where others wait for it
        self._closing: threading.Thread | None = None  # the task lets go
        self._is_released = False
        self._why: str | None = None  # why the task can't be served any more, although it may live
        self._asked_at = self._answered_at = time.monotonic()
        self._is_asked = False  # whether an answer is due
        # How many processes the kernel had killed for lack of memory a moment ago, and when that was looked up.
        self._oom_kills = [oom_kills()] * 2
        self._oom_at = 0.0

    def run(self) -> None:
        """Do all that the task asks, until its end."""
        with self._task.end() as self._end:
            others = () if self._end is None else (self._end,)
            self._link.run(self._handle_or_fail, self._is_over, others, WATCH_S)
            if self._closing is not None:
                self._closing.join()
                return
            if self._why is None:
                self._await_death()
                self._link.read_rest(self._handle_or_fail)  # its last words may be a *leave*
                self._why = self._how_it_ended()
        self._tell_end(self._why)

    def _is_over(self) -> bool:
        self._count_oom_kills()
        self._ask_task()
        if self._is_frozen():
            self._give_up(f"its task {STOPPED} {self._silence_s:g} s")
        return self._is_released or self._why is not None or self._has_ended()

    def _ask_task(self) -> None:
        """Ask the task each second for an answer; tell the gang while it gives none."""
        now = time.monotonic()
        if self._side is None or now < self._asked_at + _ASK_S:
            return
        if now - self._asked_at > _BUSY_S:  # this process was stopped, too
            self._answered_at = now
        self._asked_at = now
        if not self._is_asked:  # one question waits at most, however long the task is busy
            self._is_asked = True
            self._link.send("ping")
        if now - self._answered_at > _BUSY_S:
            self._side.send(Busy())

    def _has_ended(self) -> bool:
        if self._end is None:
            return self._task.has_ended
        end = select.poll()
        end.register(self._end, select.POLLIN)
        return bool(end.poll(0))

    def _await_death(self) -> None:
        deadline = time.monotonic() + _DYING_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_DYING_S / 1000)

    def _is_frozen(self) -> bool:
        if self._frozen is None or self._why is not None or self._closing is not None:
            return False
        pids = [] if is_stopped_with_parent(self._task.pid) else [self._task.pid]
        return bool(self._frozen.overdue(pids, time.monotonic()))

    def _give_up(self, why: str) -> None:
        """Serve this task no more; it hears so, at once or when it is continued."""
        self._why = why
        self._link.send("gone", why)

    def _handle_or_fail(self, frame: list[Any]) -> None:
        try:
            self._handle(frame)
        except Exception as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            self._give_up(f"its supervisor process has failed, which is a bug in metaflow-torchrun:\n{text}")

    def _handle(self, frame: list[Any]) -> None:
        what, *rest = frame
        if what == "begin":
            self._begin(rest[0])
        elif what == "send":
            self._known_side().send(from_wire(rest[0]))
        elif what == "pong":
            self._is_asked, self._answered_at = False, time.monotonic()
        elif what == "call" and rest[1] in _LONG:
            thread = threading.Thread(target=self._answer, args=rest, daemon=True)
            if rest[1] == "close":
                self._closing = thread
            thread.start()
        elif what == "call":
            self._answer(*rest)
        else:
            getattr(self._known_side(), what)(*rest)

    def _begin(self, about: dict[str, Any]) -> None:
        self._silence_s = float(about["timeout_s"])
        if about["num_nodes"] > 1:
            self._frozen = FrozenWatch(self._silence_s)
        self._side = (_ControlSide if "rules" in about else _MemberSide)(self._link, **about)

    def _known_side(self) -> _Side:
        assert self._side is not None
        return self._side

    def _answer(self, number: int, name: str, args: list[Any]) -> None:
        try:
            self._link.send("answer", number, getattr(self._known_side(), name)(*args))
        except TorchrunError as error:
            self._link.send("failed", number, to_plain(error))
        except OSError as error:
            self._link.send("os_error", number, type(error).__name__, str(error))
        except BaseException as error:  # a bug of ours: the task must not wait for ever
            self._link.send("os_error", number, "OSError", f"{type(error).__name__}: {error}")
        if name == "close":
            self._is_released = True
            self._link.wake()

    def _tell_end(self, how: str) -> None:
        """Tell the gang how the task has ended, and let the gang come to its end."""
        if self._side is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # who reads the task's output waits for the end of that
            self._side.send(TaskEnded(how))
            self._side.end()

    def _how_it_ended(self) -> str:
        if not self._has_ended():
            return "its task has closed the connection to its supervisor process"
        task = processes.find(self._task.pid)
        status = task.status if task is not None and task.began == self._task.began else None
        if status in (None, -signal.SIGKILL) and self._is_out_of_memory():
            return f"its task ran {describe_oom()}"
        if status is None:  # somebody has reaped it already, as a container's shell does
            return "its task ended unexpectedly, as by SIGKILL; its exit code could not be read any more"
        return f"its task {describe_exit(status)}"

    def _count_oom_kills(self) -> None:
        """Look every second: of a worker that was killed long ago the task's end does not come."""
        if (now := time.monotonic()) > self._oom_at + 1.0:
            self._oom_at = now
            self._oom_kills = [self._oom_kills[1], oom_kills()]

    def _is_out_of_memory(self) -> bool:
        before, now = self._oom_kills[0], oom_kills()
        return before is not None and now is not None and now > before


class _Side(ABC):
    """What a supervisor does for its task: all public methods but `end` answer what `channel/client` asks."""

    def __init__(self, link: LinkEnd) -> None:
        self._link = link

    def _deliver(self, message: Message) -> None:
        self._link.send("deliver", to_wire(message))

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message of this node to the control node."""

    @abstractmethod
    def end(self) -> None:
        """Let the gang come to its end: the task is gone."""


class _MemberSide(_Side):
    """A node other than the control node."""

    def __init__(
        self, link: LinkEnd, node: int, num_nodes: int, timeout_s: float, policy: Mapping[str, Any], place: str
    ) -> None:
        super().__init__(link)
        lost = partial(link.send, "lost")
        self._channel = MemberChannel(
            node, self._deliver, lost, timeout_s, ConnectPolicy(**policy), num_nodes, place=place
        )

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Send lines of this node's workers."""
        self._channel.send_lines(stream, text)

    def connect(self, addresses: list[str], port: int, token: str, timeout_s: float) -> dict[str, Any]:
        """Become a member; return the address that worked, and this node's own."""
        try:
            address = self._channel.connect(addresses, port, token, timeout_s)
        finally:
            self._link.send("hold", self._channel.hold_s)
        return {"address": address, "own_address": self._channel.own_address}

    def close(self, wait_s: float) -> None:
        """End the connection."""
        self._channel.close()

    def end(self) -> None:
        """Send what is still to be sent."""
        self._channel.close()


class _ControlSide(_Side):
    """The control node: it holds the gang."""

    def __init__(self, link: LinkEnd, num_nodes: int, timeout_s: float, token: str, rules: Mapping[str, Any]) -> None:
        super().__init__(link)
        self._rules = Rules(**rules, why_it_waits=why_it_waits)
        keepers = keepers_of(FEATURES, num_nodes)
        self._gang = Gang(num_nodes, pick_port, self._rules, keepers)
        self._channel = ControlChannel(self._gang, self._deliver, token, timeout_s, self._pass_on)
        self._left_out: dict[int, int] = {}  # lines of each node, while the task is too busy to take any

    def _pass_on(self, node: int, lines: Lines) -> None:
        """Hand lines of another node to the task, which writes them; called in the channel's thread."""
        left_out = lines.left_out + self._left_out.pop(node, 0)
        if self._link.waiting < _UNREAD_FRAMES:
            self._link.send("lines", node, lines.stdout, lines.stderr, left_out)
        else:
            self._left_out[node] = left_out + lines.stdout.count("\n") + lines.stderr.count("\n")

    def send(self, message: Message) -> None:
        """Hand a message of the control node itself to the gang."""
        self._channel.send(message)

    def lines(self, stream: str, text: str) -> None:
        """Do nothing: this node's lines are in its log already."""

    def gone(self, node: int, reason: str) -> None:
        """Tell the gang that another node's task has ended."""
        self._channel.report_gone(node, reason)

    def request(self, feature: str, data: dict[str, Any]) -> None:
        """Hand a feature what a command asks of the gang."""
        self._channel.request(feature, data)

    def listen(self, port: int | None, host: str) -> int:
        """Open the channel; return its port."""
        return self._channel.listen(port, host)

    def pop_answer(self, feature: str) -> dict[str, Any] | None:
        """Return the newest answer of a feature, once."""
        return self._gang.keepers.pop_answer(feature)

    def counts(self) -> dict[str, Any]:
        """Return what the task wants to know often: how much there is."""
        keepers = self._gang.keepers
        return {"records": self._gang.history.count, "numbers": keepers.count, "heard": keepers.heard}

    def view(self) -> dict[str, Any]:
        """Return how the gang is."""
        gang = self._gang
        return {
            "own_address": self._channel.own_address,
            "states": [(gang.nodes[node] or NodeState.ABSENT).name for node in range(gang.num_nodes)],
            "broken": None if gang.broken is None else to_plain(gang.broken),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return all that has happened to the gang."""
        return snapshot_of(self._gang, {}).stored()

    def close(self, wait_s: float) -> dict[str, Any]:
        """Wait until the members have left, a bounded time, and close; return what is known at the end."""
        self._channel.close(wait_s)
        for node, left_out in self._left_out.items():
            self._link.send("lines", node, "", "", left_out)
        return {"counts": self.counts(), "view": self.view(), "snapshot": self.snapshot()}

    def end(self) -> None:
        """Hold the gang until all nodes know its end; the next attempt may want the port."""
        self._channel.stop_listening()
        self._channel.close(self._rules.stop_s)
