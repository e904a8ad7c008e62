"""A task's connection to its supervisor (`supervisor/process`), which holds the channel and runs the launches.

No thread reads it: who waits for something reads meanwhile (`wait`), and the supervisor sends the wake signal if the step's
own code must hear of something (`gang/wakeup`). Any thread may call the methods, and a signal handler those that return at
once. The methods of `ControlClient` that ask for what is known of the gang have a connection of their own, since the
threads that store it use them. In a fork of the task nothing works.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ..errors import GangError, TorchrunError
from ..events import Event
from ..gang.keepers import Plain
from ..gang.member import Member
from ..gang.nodes import NodeState
from ..gang.policy import ConnectPolicy, Rules
from ..gang.protocol import CONTROL, Message, from_wire, to_wire
from ..gang.wire import from_plain
from ..machine import native
from ..machine.detached import Detached, beside_task
from ..machine.network import place
from ..machine.open_files import file_of
from ..machine.processes import Other, Process
from ..machine.wake import EndSignal
from ..records.snapshot import Snapshot
from ..records.vanished import Word, told_by_others
from .background import Pauses, Work
from .link import LinkEnd

_ANSWER_S = 60.0  # a busy machine, or one whose disk has to read Python first
# How long the control node waits after its own end for the other nodes' ends, so that it gets late failures.
_LEAVE_WAIT_S = 5.0
# The longest wait for news; Python runs signal handlers only between two waits. On the control node of a local run, what is
# due in the background comes as news each half second, and makes this wait end earlier.
_LOOK_S = 0.75
_ASK_S = 0.1  # another thread may have read the answer
_END_S = 2.0
_ANSWERS = frozenset({"answer", "failed", "os_error"})
_OS_ERRORS = {each.__name__: each for each in (ConnectionError, ConnectionRefusedError, TimeoutError, socket.gaierror)}


def _start(grace_s: float, asks: bool) -> tuple[Detached, EndSignal, native.socket, native.socket | None]:
    """Start a supervisor; return its parent, its end, this end of the link, and that of a second one if the task asks.

    It ends when it hears nothing more.
    """
    pairs = [native.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + asks)]
    end, held = os.pipe()
    stdout = -1
    try:
        with suppress(OSError):  # closed
            stdout = os.dup(1)
        theirs = [each.fileno() for _, each in pairs]
        words = [str(stdout), *map(str, theirs[1:]), str(grace_s)]
        files = (*theirs[1:], held, *((stdout,) if stdout >= 0 else ()))
        process = beside_task("supervisor.between", words, os.environ, theirs[0], pass_fds=files)
        process.output.close()
        return process, EndSignal(end), pairs[0][0], pairs[1][0] if asks else None
    except BaseException:
        os.close(end)
        for own, _ in pairs:
            own.close()
        raise
    finally:
        os.close(held)
        for _, their in pairs:
            their.close()
        if stdout >= 0:
            os.close(stdout)


class SupervisorGone(GangError):
    """This node's supervisor process has ended unexpectedly."""


class Client:
    """A task's connection to its supervisor process, which it starts.

    `listener` gets the messages for this node, and what else the supervisor says; who reads calls it, perhaps a signal
    handler. `more` may have ``starts``, what spares it is to start (`launch.services.starts_of`), and ``signs``, at what it
    has to look (`task/signs`).
    """

    _asks = False  # whether there is a second connection

    def __init__(self, begin: Mapping[str, Any], listener: Member, grace_s: float, more: Mapping[str, Any]) -> None:
        self._listener = listener
        # What stdout and stderr were when this began; the supervisor writes there.
        self.own_files = {name: file_of(fd) for name, fd in (("stdout", 1), ("stderr", 2))}
        self._is_hurried = False
        self.stays = False  # whether the supervisor is there for another gang after `close`
        self._supervisor: Other | None = None  # when it has said which process it is
        self.of_launch: deque[list[Any]] = deque()  # frames that concern a launch, for who runs it
        self._events: deque[Event] = deque()  # which a signal handler must not emit
        self._numbers = itertools.count()
        self._answers: dict[int, Sequence[Any]] = {}
        self._pid = os.getpid()
        self._is_closing = self._is_gone = False  # `_is_closing`: its end is no surprise
        self.hold_s = 0.0  # how long a refused task delays its end, unless the connection ends before
        self._last_words: Any = None  # what the supervisor has said at its end
        self._awaits_last_words = False
        self._how = ""  # why the supervisor is gone, where that is known
        try:
            self._parent, self._end_signal, own, asking = _start(grace_s, self._asks)
            self._link = LinkEnd(own, self._handle, self._has_ended)
            self._asking = self._link if asking is None else LinkEnd(asking, self._keep_answer, self._has_ended)
            self.say("begin", {**begin, "more": dict(more)})
        except OSError as error:  # no more processes or files
            raise GangError(
                f"This node's supervisor process could not be started on host {socket.gethostname()}: {error}. Look at "
                "the limits of processes, threads and open files there (ulimit -a)."
            ) from error

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        if self._supervisor is None:
            self.wait(lambda: self._supervisor is not None, _ANSWER_S)
        return self._process.pid

    @property
    def _why_gone(self) -> str:
        return self._how or f"its supervisor process (pid {self._process.pid}) ended unexpectedly, as by SIGKILL"

    @property
    def _process(self) -> Other:
        return self._supervisor or self._parent

    # --- what returns at once, unless the supervisor takes nothing

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self.say("send", to_wire(message))

    def end_spares(self) -> None:
        """End the spare processes: no launch comes any more."""
        if not self.stays:
            self.say("end_spares")

    def show(self, event: Event) -> bool:
        """Have an event written to this node's log; the listener gets it when that is done. Return False if it can't be."""
        self.look()
        if not self.is_gone:
            self.say("show", event.kind, event.node, event.text, event.is_detail)
        return not self.is_gone and self._link.takes

    def interrupt(self, why: str) -> None:
        """End the launch as after a SIGTERM."""
        self.say("interrupt", why)

    def time_out(self, text: str) -> None:
        """Let the launch raise `LaunchTimeout`."""
        self.say("time_out", text)

    def say(self, *frame: Any) -> None:
        """Tell the supervisor something that has no answer."""
        if self._is_in_task:
            self._link.send(*frame)

    def look(self) -> bool:
        """Handle what the supervisor has said; return False if that is being done. A signal handler may call it."""
        if not self._is_in_task:
            return True
        is_done = self._link.look()
        if is_done:
            self._see_end(self._end_signal.has_come)
        return is_done

    def signal_end(self, is_on: bool) -> None:
        """Have the wake signal come at the supervisor's end, or not."""
        if self._is_in_task:
            self._end_signal.set(is_on)
            if is_on and self._end_signal.has_come:  # before
                self._link.on_missed()

    def call_if_missed(self, call: Callable[[], None]) -> None:
        """Have something called after each `look` that came while others did it."""
        self._link.on_missed = call

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has ended."""
        return self._is_gone

    @property
    def _is_in_task(self) -> bool:
        return os.getpid() == self._pid

    def hurry(self) -> None:
        """Keep the supervisor from waiting for a reader that takes nothing: the task was told to end."""
        self._is_hurried = True

    # --- what waits

    def wait(self, is_over: Callable[[], object], timeout_s: float) -> bool:
        """Handle what the supervisor says until `is_over`, for so long, or until that is gone; return whether it is over."""
        deadline = time.monotonic() + timeout_s
        self.look()
        while True:
            with suppress(IndexError):  # another thread waits, too
                while True:
                    self._listener.emit(self._events.popleft())
            if is_over():
                return True
            if self._is_gone or (left_s := deadline - time.monotonic()) <= 0:
                return False
            is_silent = not self._link.wait(min(left_s, _LOOK_S))
            self._see_end(is_silent and self._has_ended())

    def _see_end(self, has_ended: bool) -> None:
        """See whether the supervisor is gone. Its connection may stay open: a fork of the task may hold its end."""
        if has_ended and not self._link.look():  # what it has said last; who handles that comes here next
            return
        if self._link.end is None and not has_ended:
            return
        self._how = self._how or self._link.end or ""
        self._link.close()  # so a supervisor that lives tells the gang
        self._lose()

    def _lose(self) -> None:
        if not self._is_gone and not self._is_closing:
            self._listener.lose_supervisor(self._why_gone)
        self._is_gone = True  # only now: where a signal handler has raised before, the loss is told again

    def _has_ended(self) -> bool:
        return self._process.has_ended

    def await_end(self, patience_s: float) -> bool:
        """Wait until a supervisor that is gone has left nothing behind, or for so long; return whether that is so."""
        return self._parent.wait(patience_s)

    def settle(self, patience_s: float | None = None) -> bool:
        """Wait until all lines so far are written, or for so long; return whether they are."""
        with suppress(GangError, OSError):
            more_s = math.inf if patience_s is None else patience_s
            return bool(self.call("settle", patience_s, self._is_hurried, patience_s=more_s + _ANSWER_S))
        return False

    def call(self, name: str, *args: Any, patience_s: float = _ANSWER_S) -> Any:
        """Have the supervisor do something, and return its answer; raise what that raises."""
        number = next(self._numbers)
        self.say("call", number, name, list(args))
        if not self._is_in_task or not self.wait(lambda: number in self._answers, patience_s):
            raise self._gone() if self._is_gone or not self._is_in_task else self._silent(patience_s)
        return _value_of(self._answers.pop(number))

    def close(self) -> None:
        """End what was begun, and the supervisor, unless it `stays`; without effect in a fork of the task."""
        if self._is_closing or not self._is_in_task:
            return
        self._is_closing = True
        self._end_signal.set(False)
        self._awaits_last_words = True
        try:
            with suppress(GangError, OSError):
                self._last_words = self.call("close", _LEAVE_WAIT_S, self.stays, self._is_hurried)
        finally:
            self._awaits_last_words = False
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
        self._end_signal.close()
        for each in (self._link, self._asking):
            each.close()
        self._is_gone = True
        if not self.await_end(_END_S):  # it still writes, and its reader may pause: the task's end waits for that
            atexit.register(self._parent.wait)

    def _gone(self) -> SupervisorGone:
        return SupervisorGone(f"The node can't go on (host {socket.gethostname()}): {self._why_gone}.")

    def _silent(self, seconds: float) -> SupervisorGone:
        return SupervisorGone(
            f"This node's supervisor process (pid {self._process.pid}, host {socket.gethostname()}) gave no answer for "
            f"{seconds:g} s."
        )

    # --- what comes; perhaps in a signal handler

    def _handle(self, frame: Sequence[Any]) -> None:
        what, *rest = frame
        if what == "deliver":
            self._listener.deliver(from_wire(rest[0]))
        elif what in _ANSWERS:
            self._keep_answer(frame)
        elif what == "gone":  # it ends, for a bug of ours
            self._how = rest[0]
            self._lose()
        elif what == "event":
            kind, node, text, is_detail = rest
            self._events.append(Event(kind, node, text, is_detail, is_written=True))
        elif what == "supervisor":
            self._supervisor = Other(*rest)
        elif what == "lost":
            self._listener.lose_control(rest[0])
        elif what == "must_end":
            self._listener.notice(rest[0])
        elif what == "hold":
            self.hold_s = rest[0]
        else:
            self.of_launch.append([what, *rest])

    def _keep_answer(self, frame: Sequence[Any]) -> None:
        what, number, *answer = frame
        self._answers[number] = what, *answer


def _value_of(answer: Sequence[Any]) -> Any:
    kind, *rest = answer
    if kind == "failed":
        raise from_plain(TorchrunError, rest[0], "the error")
    if kind == "os_error":
        raise _OS_ERRORS.get(rest[0], OSError)(rest[1])
    return rest[0]


class MemberClient(Client):
    """The channel of a node other than the control node."""

    def __init__(
        self,
        node: int,
        num_nodes: int,
        listener: Member,
        heartbeat_timeout_s: float,
        grace_s: float,
        policy: ConnectPolicy,
        more: Mapping[str, Any],
    ) -> None:
        about = {"node": node, "num_nodes": num_nodes, "timeout_s": heartbeat_timeout_s, "place": place()}
        super().__init__({**about, "policy": asdict(policy)}, listener, grace_s, more)
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

    _asks = True

    def __init__(
        self,
        num_nodes: int,
        listener: Member,
        heartbeat_timeout_s: float,
        token: str,
        rules: Rules,
        more: Mapping[str, Any],
    ) -> None:
        self.num_nodes = num_nodes
        self._last: dict[str, Any] = {}  # what the supervisor has said last; see `_ask`
        self._works: dict[str, Work] = {}
        super().__init__(_about_gang(num_nodes, heartbeat_timeout_s, token, rules), listener, rules.grace_s, more)

    def begin_alone(self, listener: Member, heartbeat_timeout_s: float, rules: Rules) -> None:
        """Begin another gang of one, after `close`, with a supervisor that stayed."""
        self._listener, self._is_closing, self._last_words, self._last, self._works = listener, False, None, {}, {}
        self._link.send("begin", {**_about_gang(1, heartbeat_timeout_s, "", rules), "more": {}})

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
        found: Plain | None = self._inquire("pop_answer", feature)
        return found

    def follow(self, tasks: Mapping[int, Process], are_replacements: bool = False) -> None:
        """Have the gang told when the tasks of other nodes end, by index; returns at once."""
        self.say("follow", [[node, task.pid, task.began] for node, task in tasks.items()], are_replacements)

    def nodes_to_start(self) -> list[int]:
        """Return the nodes in whose place another task is to be started, each once."""
        found: list[int] = self._inquire("nodes_to_start")
        return found

    def report_gone(self, node: int, reason: str) -> None:
        """Tell the gang that a node's task has ended; safe to call for one that left before."""
        self.say("gone", node, reason)

    def in_background(self, name: str, do: Callable[[], Pauses]) -> Work:
        """Return a work, which the supervisor has begun when it is due."""
        work = self._works[name] = Work(do, lambda pauses: self.say("look_in", name, *pauses))
        return work

    def _handle(self, frame: Sequence[Any]) -> None:
        if frame[0] != "look":
            super()._handle(frame)
        elif frame[1] in self._works:
            self._works[frame[1]].begin()

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
                self._last[what] = self._inquire(what)
        found: dict[str, Any] = (self._last_words or self._last).get(what, {})
        return found

    def _inquire(self, name: str, *args: Any) -> Any:
        """Do as `call`, over the second connection: the threads that store what is known of the gang are asking."""
        number, link, deadline = next(self._numbers), self._asking, time.monotonic() + _ANSWER_S
        if self._is_in_task:
            link.send("call", number, name, list(args))
            while number not in self._answers and link.end is None and time.monotonic() < deadline:
                link.wait(_ASK_S)
        if number not in self._answers:
            raise self._gone() if link.end is not None or not self._is_in_task else self._silent(_ANSWER_S)
        return _value_of(self._answers.pop(number))

    @property
    def _is_missed(self) -> bool:
        """Whether the supervisor has ended without a last word; its end may be seen before the word is read."""
        has_ended = self._is_gone or self._asking.end is not None
        return has_ended and self._last_words is None and not self._awaits_last_words


def _about_gang(num_nodes: int, heartbeat_timeout_s: float, token: str, rules: Rules) -> dict[str, Any]:
    """Return what a supervisor must know to hold a gang."""
    given = {name: value for name, value in vars(rules).items() if name != "why_it_waits"}
    return {"num_nodes": num_nodes, "timeout_s": heartbeat_timeout_s, "token": token, "rules": given}
