"""A task's connection to its supervisor (`supervisor/process`), which holds the channel and runs the launches.

One thread (`torchrun-link`) reads what comes and writes what goes. Any thread may call the public methods, also in a
signal handler; `call` and what uses it wait for an answer. In a fork of the task nothing works.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

from ..errors import GangError, TorchrunError
from ..events import Event, Subscriber
from ..gang.keepers import Plain
from ..gang.nodes import NodeState
from ..gang.policy import ConnectPolicy, Rules
from ..gang.protocol import CONTROL, Message, from_wire, to_wire
from ..gang.wire import from_plain
from ..machine.detached import Detached, beside_task
from ..machine.estate import AGENT_VARIABLE, Estate
from ..machine.network import place
from ..machine.open_files import file_of
from ..machine.processes import Other, Process, await_or_kill, living_with, send_signal
from ..records.snapshot import Snapshot
from ..records.vanished import Word, told_by_others
from .link import LinkEnd

_ANSWER_S = 60.0  # a busy machine, or one whose disk has to read Python first
# How long the control node waits after its own end for the other nodes' ends, so that it gets late failures.
_LEAVE_WAIT_S = 5.0
_CONTINUE_S = 5.0  # between continuing a silent supervisor, which somebody may have stopped
_END_S = 2.0
_DETACHED_S = 2.0  # for what detached itself from workers that are gone, after SIGTERM
_OS_ERRORS = {each.__name__: each for each in (ConnectionError, ConnectionRefusedError, TimeoutError, socket.gaierror)}


def _start() -> tuple[Detached, LinkEnd]:
    """Start a supervisor; return its guardian and this end of the link. It ends when it hears nothing more."""
    own, theirs = socket.socketpair()
    stdout = -1
    try:
        with suppress(OSError):  # closed
            stdout = os.dup(1)
        with theirs:
            files = (stdout,) if stdout >= 0 else ()
            process = beside_task("supervisor.guardian", [str(stdout)], os.environ, theirs.fileno(), pass_fds=files)
        process.output.close()
        return process, LinkEnd(own)
    except BaseException:
        own.close()
        raise
    finally:
        if stdout >= 0:
            os.close(stdout)


class Listener(Protocol):
    """What hears of the gang in the task; the link's thread calls it. `gang.member.Member` is one."""

    emit: Subscriber

    def deliver(self, message: Message) -> None:
        """Handle a message of the control node."""

    def lose_control(self, reason: str) -> None:
        """Handle the loss of the control node; called once."""

    def lose_supervisor(self, how: str) -> None:
        """Handle the end of this node's supervisor."""


class SupervisorGone(GangError):
    """This node's supervisor process has ended unexpectedly."""


class Client:
    """A task's connection to its supervisor process, which it starts.

    In the link's thread `listener` gets the messages for this node, and what else the supervisor says. `starts` is what
    spares it is to start, as `watchers.starts_of` returns it.
    """

    def __init__(self, begin: Mapping[str, Any], listener: Listener, starts: Plain | None = None) -> None:
        self._listener = listener
        # What stdout and stderr were when this began; the supervisor writes there.
        self.own_files = {name: file_of(fd) for name, fd in (("stdout", 1), ("stderr", 2))}
        self._is_hurried = False
        self.stays = False  # whether the supervisor is there for another gang after `close`
        self._supervisor: Other | None = None  # when it has said which process it is
        self._estate: list[Any] = list(Estate())  # what there is to be ended now
        self._agent_began = ""
        self.launch_news: Callable[[tuple[Any, ...]], None] = lambda frame: None  # gets what concerns a launch
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._pid = os.getpid()
        self._continue_s = min(_CONTINUE_S, begin["timeout_s"] / 5)
        self._continue_at = 0.0  # only the link's thread uses it
        # `_is_closing`: its end is no surprise. `_is_over`: nothing more is sent or read.
        self._is_closing = self._is_over = self._is_gone = False
        self.hold_s = 0.0  # how long a refused task delays its end, unless the connection ends before
        self._last_words: Any = None  # what the supervisor has said at its end
        try:
            self._guardian, self._link = _start()
            self._how = ""  # why the supervisor is gone, where that is known
            self._link.send("begin", {**begin, "starts": starts})
            self._thread = threading.Thread(target=self._run, name="torchrun-link", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no more processes, files or threads
            raise GangError(
                f"This node's supervisor process could not be started on host {socket.gethostname()}: {error}. Look at "
                "the limits of processes, threads and open files there (ulimit -a)."
            ) from error

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return self._process.pid

    @property
    def _why_gone(self) -> str:
        return self._how or f"its supervisor process (pid {self.pid}) ended unexpectedly, as by SIGKILL"

    @property
    def _process(self) -> Other:
        return self._supervisor or self._guardian

    # --- what any thread may call

    def send(self, message: Message) -> None:
        """Send a message to the control node; returns at once."""
        self.say("send", to_wire(message))

    def end_spares(self) -> None:
        """End the spare processes: no launch comes any more; returns at once."""
        if not self.stays:
            self.say("end_spares")

    def say(self, *frame: Any) -> None:
        """Tell the supervisor something that has no answer; returns at once."""
        if self._is_in_task:
            self._link.send(*frame)

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has ended."""
        return self._is_gone

    def clean_up(self, patience_s: float) -> None:
        """Wait until the guardian has ended all that a supervisor has left that is gone; end it here if that is gone, too."""
        self._await_guardian(patience_s)
        agent, grace_s, _, folders = self._estate
        if agent is not None:
            left = living_with(f"{AGENT_VARIABLE}={agent}", self._agent_began)
            for pid in left:
                send_signal(pid, signal.SIGTERM)
            await_or_kill(left, min(grace_s, _DETACHED_S))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _await_guardian(self, patience_s: float) -> bool:
        self._guardian.send_signal(signal.SIGCONT)  # nobody else continues one that somebody has stopped
        return self._guardian.wait(patience_s)

    def hurry(self) -> None:
        """Keep the supervisor from waiting for a reader that takes nothing: the task was told to end."""
        self._is_hurried = True

    def settle(self, patience_s: float | None = None) -> bool:
        """Wait until all lines so far are written, or for so long; return whether they are."""
        with suppress(GangError, OSError):
            more_s = math.inf if patience_s is None else patience_s
            return bool(self.call("settle", patience_s, self._is_hurried, patience_s=more_s + _ANSWER_S))
        return False

    @property
    def _is_in_task(self) -> bool:
        return os.getpid() == self._pid

    def call(self, name: str, *args: Any, patience_s: float = _ANSWER_S) -> Any:
        """Have the supervisor do something, and return its answer; raise what that raises."""
        number, answered, answer = next(self._numbers), threading.Event(), list[Any]()
        self._answers[number] = answered, answer
        if self._is_gone or not self._is_in_task:  # nobody would answer
            answered.set()
        try:
            self.say("call", number, name, list(args))
            has_answered = answered.wait(None if patience_s == math.inf else patience_s)
            if not answer:
                raise self._gone() if has_answered else self._silent(patience_s)
        finally:
            del self._answers[number]
        kind, *rest = answer
        if kind == "failed":
            raise from_plain(TorchrunError, rest[0], "the error")
        if kind == "os_error":
            raise _OS_ERRORS.get(rest[0], OSError)(rest[1])
        return rest[0]

    def close(self) -> None:
        """End what was begun, and the supervisor, unless it `stays`; without effect in a fork of the task."""
        if self._is_closing or not self._is_in_task:
            return
        self._is_closing = True
        with suppress(GangError, OSError):
            self._last_words = self.call("close", _LEAVE_WAIT_S, self.stays, self._is_hurried)
        if not self.stays:
            self._end()

    def end(self) -> None:
        """End a supervisor that stayed."""
        if self.stays and self._is_in_task:
            self.stays = False
            with suppress(GangError, OSError):
                self.call("close", 0.0, self.stays, self._is_hurried)
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._link.wake()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._link.close()
        if not self._await_guardian(_END_S):  # it still writes, and its reader may pause: the task's end waits for that
            atexit.register(self._guardian.wait)

    # --- in the link's thread

    def _run(self) -> None:
        try:
            self._link.run(self._handle, self._look, look_s=self._continue_s)
        except Exception as error:  # a bug of ours: without this thread nobody hears anything
            self._how = f"its link to its supervisor failed, which is a bug in metaflow-torchrun: {error!r}"
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                self._how = "its code has closed the connection to its supervisor process, as os.closerange(3, …) does"
            self._link.close()  # so the supervisor tells the gang
        self._is_gone = True
        for answered, _ in list(self._answers.values()):
            answered.set()
        if not self._is_closing:
            self._listener.lose_supervisor(self._why_gone)

    def _look(self) -> bool:
        """Continue a supervisor that somebody has stopped; return whether this end has closed."""
        if (now := time.monotonic()) >= self._continue_at:
            self._continue_at = now + self._continue_s
            for each in (self._guardian, self._process):
                each.send_signal(signal.SIGCONT)  # a process that runs does not notice
            # A fork of the task may hold the other end, too: then nothing else tells.
            return self._is_over or self._process.has_ended
        return self._is_over

    def _gone(self) -> SupervisorGone:
        return SupervisorGone(f"The node can't go on (host {socket.gethostname()}): {self._why_gone}.")

    def _silent(self, seconds: float) -> SupervisorGone:
        return SupervisorGone(
            f"This node's supervisor process (pid {self.pid}, host {socket.gethostname()}) gave no answer for {seconds:g} s."
        )

    def _handle(self, frame: Sequence[Any]) -> None:
        what, *rest = frame
        if what == "deliver":
            self._listener.deliver(from_wire(rest[0]))
        elif what == "ping":
            self._link.send("pong")
        elif what in ("answer", "failed", "os_error"):
            number, *answer = rest
            if number in self._answers:
                answered, found = self._answers[number]
                found[:] = [what, *answer]
                answered.set()
        elif what == "gone":  # the supervisor ends, since the task was frozen, or for a bug of ours
            self._how = rest[0]
            self._listener.lose_supervisor(rest[0])
        elif what == "event":
            kind, node, text, is_detail = rest
            self._listener.emit(Event(kind, node, text, is_detail, is_written=True))
        elif what == "estate":
            self._estate, self._agent_began = rest
        elif what == "supervisor":
            self._supervisor = Other(*rest)
        elif what == "lost":
            self._listener.lose_control(rest[0])
        elif what == "hold":
            self.hold_s = rest[0]
        else:
            self.launch_news((what, *rest))


class MemberClient(Client):
    """The channel of a node other than the control node."""

    def __init__(
        self,
        node: int,
        num_nodes: int,
        listener: Listener,
        heartbeat_timeout_s: float,
        policy: ConnectPolicy,
        starts: Plain | None = None,
    ) -> None:
        about = {"node": node, "num_nodes": num_nodes, "timeout_s": heartbeat_timeout_s, "place": place()}
        super().__init__({**about, "policy": asdict(policy)}, listener, starts)
        self._patience_s = heartbeat_timeout_s + _ANSWER_S

    def connect(self, addresses: Sequence[str], port: int, token: str, timeout_s: float) -> str:
        """Try all addresses once, join over the first that works, and return it.

        Raises OSError if none works, a ConnectionRefusedError if nobody listens at any; then it can be called again.
        Raises TorchrunError if the control node turns this node away.
        """
        patience_s = timeout_s + self._patience_s
        return str(self.call("connect", list(addresses), port, token, timeout_s, patience_s=patience_s))


class ControlClient(Client):
    """The channel of the control node, and its gang; a gang of one does not listen."""

    def __init__(
        self,
        num_nodes: int,
        listener: Listener,
        heartbeat_timeout_s: float,
        token: str,
        rules: Rules,
        starts: Plain | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self._last: dict[str, Any] = {}  # what the supervisor has said last; see `_ask`
        super().__init__(_about_gang(num_nodes, heartbeat_timeout_s, token, rules), listener, starts)

    def begin_alone(self, listener: Listener, heartbeat_timeout_s: float, rules: Rules) -> None:
        """Begin another gang of one, after `close`, with a supervisor that stayed."""
        self._listener, self._is_closing, self._last_words, self._last = listener, False, None, {}
        self._link.send("begin", {**_about_gang(1, heartbeat_timeout_s, "", rules), "starts": None})

    def listen(self, port: int | None, host: str = "") -> int:
        """Open the channel and return its port; raise GangError if that can't be.

        None for `port` lets the kernel choose. An empty `host` means all interfaces.
        """
        return int(self.call("listen", port, host))

    def relay_lines(self) -> None:
        """Have the other nodes' lines written into this node's log."""
        self.say("relay")

    def has_written(self, node: int, text: str) -> bool:
        """Return whether this node's log has all lines of a text that a node's workers wrote."""
        with suppress(GangError, OSError):
            return bool(self.call("has_written", node, text))
        return False

    def request(self, feature: str, data: Plain) -> None:
        """Hand a feature what a command asks of the gang."""
        self.say("request", feature, data)

    def pop_answer(self, feature: str) -> Plain | None:
        """Return the newest answer of a feature, once."""
        found: Plain | None = self.call("pop_answer", feature)
        return found

    def follow(self, tasks: Mapping[int, Process]) -> None:
        """Have the gang told when the tasks of other nodes end, by index; returns at once."""
        self.say("follow", [[node, task.pid, task.began] for node, task in tasks.items()])

    def report_gone(self, node: int, reason: str) -> None:
        """Tell the gang that a node's task has ended; safe to call for one that left before."""
        self.say("gone", node, reason)

    # --- what is known of the gang; after its end, what was known last

    def counts(self) -> tuple[int, int, int]:
        """Return how many records there are, how many numbers of features have come, and of how many features.

        That the supervisor is missed is a record, too: see `snapshot`.
        """
        counts = self._ask("counts")
        return counts.get("records", 0) + self._is_missed, counts.get("numbers", 0), counts.get("heard", 0)

    def states(self) -> dict[int, NodeState]:
        """Return the state of each node."""
        states = self._ask("view").get("states") or [NodeState.ABSENT.name] * self.num_nodes
        return {node: NodeState[name] for node, name in enumerate(states)}

    @property
    def members(self) -> list[int]:
        """Indexes of the nodes, besides the control node, that have joined and not yet left."""
        there = (NodeState.JOINED, NodeState.DONE)
        return [node for node, state in self.states().items() if node != CONTROL and state in there]

    @property
    def absent(self) -> list[int]:
        """Indexes of the nodes that have not arrived."""
        return [node for node, state in self.states().items() if state is NodeState.ABSENT]

    @property
    def broken(self) -> TorchrunError | None:
        """Why the gang can't go on, if it can't."""
        found = self._ask("view").get("broken")
        return None if found is None else from_plain(TorchrunError, found, "the error")

    def snapshot(self, about: Mapping[str, Any]) -> Snapshot:
        """Return all that has happened to the gang until now; `about` has more fields.

        If the supervisor is gone, it tells that, too.
        """
        found = self._ask("snapshot")
        known = replace(Snapshot.read(found), **about) if found else None
        if self._is_missed:
            known = told_by_others(known, [Word(str(self._gone()), time.time(), self.num_nodes)])
        return known or Snapshot(self.num_nodes)

    def _ask(self, what: str) -> dict[str, Any]:
        if self._last_words is None and not self._is_gone:
            with suppress(GangError, OSError):
                self._last[what] = self.call(what)
        found: dict[str, Any] = (self._last_words or self._last).get(what, {})
        return found

    @property
    def _is_missed(self) -> bool:
        """Whether the supervisor has ended without a last word."""
        return self._is_gone and self._last_words is None


def _about_gang(num_nodes: int, heartbeat_timeout_s: float, token: str, rules: Rules) -> dict[str, Any]:
    """Return what a supervisor must know to hold a gang."""
    given = {name: value for name, value in vars(rules).items() if name != "why_it_waits"}
    return {"num_nodes": num_nodes, "timeout_s": heartbeat_timeout_s, "token": token, "rules": given}
