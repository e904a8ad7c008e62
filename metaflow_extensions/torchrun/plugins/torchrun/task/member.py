"""A node as a member of its gang, in its task, from the step's begin to its end.

It numbers the launches. News of the gang must reach the step's code wherever that is: inside of `run` the supervisor
handles it, outside of it it comes as an exception in the main thread (`orders`). Each change of state is one assignment:
a handler of a signal leaves the state alone, or raises, so that what it has interrupted does not go on.
"""

from __future__ import annotations

import enum
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import GangError, LaunchFailed, TorchrunError, TorchrunPreempted, chain
from ..events import Event
from ..gang.cause import Cause, FailureText, cause_of, failed
from ..gang.limits import QUIET_S, REMIND_S
from ..gang.messages import CONTROL, Abort, Answer, Farewell, Leave, Message, from_wire, to_wire
from ..supervisor.endings import NotNeeded, lost_control, preempted
from ..texts import names
from ..tracebacks import user_traceback, words_of
from . import orders
from .console import to_log
from .link import Link
from .transfer import Transfer

_ACK_WAIT_S = 5.0  # how long a leaving node waits for the control node's receipt


class State(enum.Enum):
    """Where the step's code is; this decides how news reaches it."""

    STEP = "joins, begins a launch, or is in code of its own: news interrupts it"
    LAUNCH = "in a launch: news goes to the supervisor"
    TOLD = "in code of its own, and has the gang's error already: only an order to end interrupts it"
    WAITING = "ended on the control node, which waits for the others: news interrupts it"
    FAILING = "ended with an error, which is being reported: nothing interrupts that"
    STORING = "ended, on the control node after all others have left; its results are being stored"
    ENDING = "was ordered to end: the gang knows, and the code of the step has the error"
    LEFT = "this node has left"


_URGENT = frozenset({"worker_failed", "stopping", "failed"})  # events that report a failure
_OVER = frozenset({State.FAILING, State.STORING, State.ENDING, State.LEFT})


class Member:
    """One node in its gang, over a link to a supervisor that was told of it."""

    def __init__(self, node: int, num_nodes: int, link: Link) -> None:
        self.node, self.num_nodes, self.link = node, num_nodes, link
        self.host = socket.gethostname()
        self.command: str | None = None  # of torchrun, when that becomes known
        self.shows_output = True  # whether the last launch shows everything that a failing worker writes
        self.meanwhile: Callable[[], None] = lambda: None  # called now and then while our code waits
        self.store_now: Callable[[], None] = lambda: None  # stores what is known of the gang
        self.save_log: Callable[[], None] = lambda: None  # called when the log has a failure
        self.job: Transfer | None = None  # what `meanwhile` has begun
        self.uploads = False  # whether a launch has something to store: that comes before all else
        self.of_launch: deque[Sequence[Any]] = deque()  # frames that concern a launch, for who runs it
        self.broken: TorchrunError | None = None  # why the gang can't go on
        self._lost: TorchrunError | None = None  # the loss of the control node, which that node may not know of
        self._verdict: TorchrunError | None = None  # of the last launch
        self._state = State.STEP
        # What was heard of the control node: that this node is "here", what `Farewell` says, and that it is "gone".
        self._heard: set[str] = set()
        self._launches = 0
        self._turn = threading.Lock()  # held by the thread that is in a launch
        # Why this node was told to end, until that is raised. In a launch its supervisor hears of each, and handles it.
        self._orders: list[str] = []
        self.is_forked = False  # whether this is a fork of the task: only the task itself is a node of the gang
        self.is_interrupted = False  # by Ctrl-C
        self._is_raised = False  # whether that has been raised
        self._not_needed: NotNeeded | None = None  # what each call of `run` raises on a node that was dismissed
        self._has_bad_news = False  # in the log
        link.handle, link.turn = self._handle, self._between_waits
        orders.begin(self)

    @property
    def must_end(self) -> bool:
        """Whether this node was told to end."""
        return bool(self._orders) or self.is_interrupted

    @property
    def has_job(self) -> bool:
        """Whether `meanwhile` uses the datastore, and is not late with it."""
        return self.job is not None and not self.job.over

    @property
    def is_storing(self) -> bool:
        """Whether the step's code has ended well here and its results are being stored."""
        return self._state is State.STORING

    @property
    def is_leaving(self) -> bool:
        """Whether this node leaves the gang, although a launch may still run in another thread."""
        return self._state in (State.FAILING, State.LEFT)

    # --- what the supervisor says ---------------------------------------------------------------

    def _handle(self, frame: Sequence[Any]) -> None:
        what, *rest = frame
        if what == "deliver":
            self.deliver(from_wire(rest[0]))
        elif what == "event":
            kind, text = rest
            if kind == "command":
                self.command = text.removeprefix("runs: ")
            self._has_bad_news |= kind in _URGENT
        elif what == "lost":
            if "bye" not in self._heard:
                self._lost = lost_control(rest[0])
                self._break(self._lost)
            self._heard.add("gone")
        elif what == "must_end":
            self._notice(rest[0])
        elif what == "supervisor_lost":
            cause = Cause("agent_ended", self.node, self.host, exception=rest[0])
            self._break(failed(LaunchFailed, FailureText(cause)))
            self._heard.add("gone")
        elif what == "forked":  # this is a fork of the task, which has left
            self.is_forked, self._state = True, State.LEFT
        else:
            self.of_launch.append(frame)

    def deliver(self, message: Message) -> None:
        """Handle a message of the control node."""
        if isinstance(message, Answer) and message.error is None:
            self._heard.add("here")
        elif isinstance(message, Abort):
            self._break(message.error)
        elif isinstance(message, Farewell):
            self._heard.add(message.what)

    def _break(self, error: TorchrunError) -> None:
        if self._state not in _OVER:
            self.broken = self.broken or error  # a launch ends by its supervisor

    def _notice(self, why: str) -> None:
        """End this node as after a SIGTERM, once: notices repeat; `why` follows the words "node 1 was preempted: "."""
        if self.broken is None and not self._orders:
            self.order(why, is_now=False)

    # --- what reaches the step's code -----------------------------------------------------------

    def order(self, why: str, is_now: bool) -> bool:
        """End this node; return False if that is no concern of the gang any more. If `is_now`, it is raised here."""
        if self._state in _OVER:
            return self._state is State.FAILING  # it ends already
        self._orders.append(why)
        if self._state is State.LAUNCH:
            self.link.send("interrupt", why)
        if is_now:
            self.raise_news()
        else:
            self.link.wake()
        return True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt where our code waits."""
        self.is_interrupted = True
        self.link.wake()

    def raise_news(self) -> None:
        """Raise Ctrl-C, the gang's error or the order to end, once; not what a launch handles."""
        # While this node leaves, which has limits, only a second Ctrl-C is heard.
        if self.is_interrupted and not self._is_raised and not self.is_leaving:
            self._is_raised = True
            raise KeyboardInterrupt
        if self._state is State.LAUNCH or self._state in _OVER:
            return
        if self.broken is not None and self._state is not State.TOLD:
            self._orders.clear()
            self._state = State.TOLD
            raise self.broken
        if self._orders:
            error = self.terminated()
            self._state = State.ENDING
            self.send(Leave("failed", self.cause_of(error)))
            orders.end(self)
            raise error

    def _between_waits(self) -> None:
        """Do what a wait leaves to do: raise news, and store what is due."""
        if self._has_bad_news:
            self._has_bad_news = False
            self.save_log()
        self.raise_news()
        self.meanwhile()

    def terminated(self) -> TorchrunPreempted:
        """Return the error for a task that was told to stop."""
        return preempted(self.node, self.host, (self._orders or [orders.SIGTERM_CAME])[0])

    # --- called by the step's code --------------------------------------------------------------

    def say(self, event: Event) -> None:
        """Have an event written to this node's log, by the supervisor if it is there."""
        if self.link.end is None:
            self.link.send("show", event.kind, event.node, event.text, event.is_detail)
        else:
            to_log(event, self.num_nodes)

    def note(self, text: str, is_detail: bool = False) -> None:
        """Have a line written to this node's log."""
        self.say(Event("note", self.node, text, is_detail))

    def send(self, message: Message) -> None:
        """Send a message to the control node."""
        self.link.send("send", to_wire(message))

    def refuse_in_child(self) -> None:
        """Raise if this process is a fork of the task."""
        if self.is_forked:
            raise GangError(
                "current.torch.run was called in a process that was forked from the task. Call it in the task itself, for "
                "example in the step's own code."
            )

    @property
    def is_dismissed(self) -> bool:
        """Whether this node has left since a launch has ended well without it."""
        return self._not_needed is not None and not self.is_forked

    def dismiss(self, launch: int) -> NoReturn:
        """End the step's code here: the launch has ended well without this node, which the gang counts no more."""
        self._not_needed = NotNeeded(f"launch {launch} has ended well without this node, so its step ends here")
        raise self._not_needed

    def begin_launch(self, request: Any = None) -> int:
        """Have the supervisor begin a launch, and return its number; raise TorchrunError if none can begin."""
        self.refuse_in_child()
        number = self._launches
        if not self._turn.acquire(blocking=False):
            raise GangError(
                f"current.torch.run was called on node {self.node} while launch {number - 1} still ran there, in another "
                "thread. A node takes part in one launch at a time: let the step's threads call it one after the other, in "
                "the same order on every node."
            )
        try:
            self._check_that_one_may_begin()
            self._verdict = None
            self.of_launch.clear()
            self._launches += 1
            self.link.send("run", number, request)  # first, or it would hear of an interruption before
            self._state = State.LAUNCH  # from now on no handler raises
        except BaseException:
            if self._launches > number:
                self.link.send("give_up", number, None)
            self._turn.release()
            raise
        return number

    def _check_that_one_may_begin(self) -> None:
        if self._not_needed is not None:
            raise self._not_needed
        self._hear()
        if self.broken is not None:
            raise self.broken
        if not self._heard.isdisjoint({"bye", "gone"}) or self._state not in (State.STEP, State.TOLD):
            raise GangError(
                "current.torch.run was called after the gang had ended: the control node's step has already finished. Every "
                "node must call it the same number of times."
            )

    def _hear(self) -> None:
        """Raise what has come, and the order to end again if the step's code has swallowed it: the gang has failed for it."""
        with self.link.ours():
            self.link.read()
        self.raise_news()
        if self._state is State.ENDING:
            raise self.terminated()

    def end_launch(self, verdict: TorchrunError | None, failing: bool = False, handled: int | None = None) -> None:
        """End the launch: the step's own code runs again. Raise news that came too late for the launch.

        `verdict` is what the gang has decided. If `failing`, the launch raises it, or another error. `handled` is how many
        interruptions the launch has handled; None: all.
        """
        self._verdict = verdict
        del self._orders[:handled]
        try:
            if self._state is State.LAUNCH:
                told = verdict is not None or (failing and self.broken is not None)
                self._state = State.TOLD if told else State.STEP  # what comes later is the step's
        finally:
            self._turn.release()
        if not failing or self._orders:
            self.raise_news()

    def finish(self) -> None:
        """Report that the step's code has ended well; the node stays a member until its results are stored."""
        if self._state is State.LAUNCH:
            raise GangError(
                f"The step's code has ended on node {self.node} while launch {self._launches - 1} still ran there in "
                "another thread. Wait for the thread that has called current.torch.run."
            )
        self._hear()
        if self._state in (State.STEP, State.TOLD):
            self.link.send("end_spares")
            self.send(Leave("done"))
            if self.node == CONTROL and self.num_nodes > 1:
                self._state = State.WAITING
            else:
                self._begin_storing()

    def _begin_storing(self) -> None:
        self._state = State.STORING
        orders.end(self)

    def fail(self, in_hurry: bool) -> None:
        """Let nothing interrupt the report of the error that ends the step's code here, nor, `in_hurry`, its reader."""
        if in_hurry:
            self.link.send("hurry")
        if self._state not in _OVER:
            self._state = State.FAILING

    def await_others(self, remaining: Callable[[], list[int]]) -> None:
        """Wait on the control node until the others have left; raise if a node fails or is lost meanwhile.

        From then on this node's results are being stored, as on a member after `finish`.
        """
        if self._state is not State.WAITING:  # a gang of one has nobody to wait for
            return
        patience_s = QUIET_S
        while not self.link.wait(lambda: "alone" in self._heard or self.broken is not None, patience_s):
            if self.link.end is not None:
                break
            patience_s = REMIND_S
            self.note(
                f"this node has finished; waiting until {names(remaining())} ended the step and stored the results"
            )
        if self.broken is not None:
            raise self.broken
        self._begin_storing()

    def leave(self, error: BaseException | None = None, hold_s: float = 0.0) -> None:
        """Leave the gang; safe to call more than once, and without effect in a forked child.

        It waits for the control node's receipt, since some systems kill all tasks as soon as one has failed. After an
        error it waits `hold_s` seconds at most for the channel's end: then the control node's log holds the cause.
        """
        before = self._state
        if before is State.LEFT:
            return
        orders.end(self)
        self._state = State.LEFT
        self.meanwhile = lambda: None
        try:
            if before is not State.ENDING:  # otherwise *leave* was sent already
                cause = None if error is None or self.gang_knows(error) else self.cause_of(error)
                self.send(Leave("left" if error is None else "failed", cause))
            self.link.wait(lambda: "here" not in self._heard or self._heard & {"received", "bye", "gone"}, _ACK_WAIT_S)
            if error is not None and before is not State.ENDING:  # a preempted machine has no time for it
                self.link.wait(lambda: "here" not in self._heard or "gone" in self._heard, hold_s)
        finally:
            self.link.close()

    def gang_knows(self, error: BaseException) -> bool:
        """Return whether the gang knows this error already: it is, or is chained to, the gang's own verdict."""
        return any(link is self._verdict or (link is self.broken and link is not self._lost) for link in chain(error))

    def cause_of(self, error: BaseException) -> Cause:
        """Return an exception of this node's own step as a cause."""
        if isinstance(error, TorchrunError) and (cause := cause_of(error)) is not None:
            if error is not self._lost:
                return cause
            text = f"it lost the connection to the control node: {cause.exception}"
            return Cause("lost", self.node, self.host, exception=text)
        if isinstance(error, KeyboardInterrupt):
            return Cause("interrupted", self.node, self.host, exception="KeyboardInterrupt")
        if isinstance(error, TorchrunError):  # it says all
            return Cause("call", self.node, self.host, exception=words_of(error))
        return Cause("step", self.node, self.host, exception=words_of(error), detail=user_traceback(error))
