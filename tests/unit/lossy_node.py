"""A node of a gang as `test_random_losses` has it: the real member, seat and course; its workers and connection are data."""

from collections import deque

from fake_link import FakeLink, member_of

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    CONTROL,
    Answer,
    Ended,
    Go,
    Join,
    Leave,
    Stop,
    Store,
    Stored,
    from_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.node import news
from metaflow_extensions.torchrun.plugins.torchrun.node.course import NodeCourse
from metaflow_extensions.torchrun.plugins.torchrun.node.endings import MustEnd, NotNeeded
from metaflow_extensions.torchrun.plugins.torchrun.node.news import Do, Seen
from metaflow_extensions.torchrun.plugins.torchrun.node.outcome import Outcome
from metaflow_extensions.torchrun.plugins.torchrun.node.phases import Phase
from metaflow_extensions.torchrun.plugins.torchrun.node.seat import Seat
from metaflow_extensions.torchrun.plugins.torchrun.task.member import State

GRACE_S, CLOSE_S = 30.0, 5.0  # grace_s, and how long the channel waits for the members at its end
END = "the connection ends"  # in a queue


class Link(FakeLink):
    """The task's link to its supervisor."""

    def __init__(self, task):
        super().__init__()
        self._task = task

    def send(self, *frame):
        what, *rest = frame
        if what == "send":
            self._task.send(from_wire(rest[0]))
        elif what == "interrupt":
            self._task.seat.interrupt(*rest)
            self._task.pump()

    def wait(self, is_over, timeout_s, files=()):
        return is_over()

    def close(self):
        self._task.stage, self._task.closes_at = "leaves", self._task.world.now + CLOSE_S


class Task:
    """A node's task and its supervisor, which is the seat's link to the control node."""

    own_address = None

    def __init__(self, world, node, name):
        self.world, self.node, self.name = world, node, name
        self.join = Join(node, f"host-{node}", self.name, self.name)
        self.up, self.down = deque([self.join]), deque()
        self.seat, self.link = Seat(node, world.num_nodes, bool, self), Link(self)
        self.member = member_of(self.link, node, world.num_nodes, bool)
        self.stage, self.calls = "joins", 0  # then own, runs, ended, leaves and over; and the calls of `run`
        self.error = None  # with which the step has ended
        self.is_dead = False
        self.silent_since, self.closes_at = None, 0.0
        self.course, self.todo, self.is_closing = None, deque(), False
        self.end, self.handled = None, 0  # of the launch, until the step's code has it
        self.running = self.stores = None  # the *go* of the workers, the *store* of the upload
        self.workers = ""  # then run, have failed or must stop

    def send(self, message):
        """Send a message to the control node."""
        self.up.append(message)

    # --- the step's code

    def go_on(self):
        """Call `run`, or end; steps may differ in how often they call it, which is an error."""
        calls, deviates = self.calls < self.world.launches, self.world.happens(0.01, self.node)
        self.world.checks.deviates |= deviates
        if self.world.happens(0.01, self.node):
            self.fail(ValueError("the step's own code"))
        elif calls is not deviates:
            self.attempt(self.call_run)
        else:
            self.stage = "ended"
            self.attempt(self.member.finish)

    def attempt(self, do):
        """Do a part of the step's code; some steps catch errors."""
        try:
            do()
        except NotNeeded:
            self.stage = "ended"
            self.attempt(self.member.finish)
        except TorchrunError as error:
            if self.stage in ("joins", "ended") or not self.world.catches or self.member._state is State.ENDING:
                self.fail(error)
            else:
                self.stage = "own"

    def fail(self, error):
        self.error = error
        self.member.leave(error)

    def call_run(self):
        self.calls += 1
        number = self.member.begin_launch()
        self.seat.begin_launch()
        self.stage, self.handled = "runs", 0
        self.course = NodeCourse(self.world.plan(self.node), number, self.node, f"host-{self.node}")
        self.member.has_begun()
        self.take(news.Called(self.seat.broken))

    def return_from_run(self):
        end, self.end, self.stage = self.end, None, "own"
        verdict = end.verdict.error if isinstance(end, Outcome) else None
        error = verdict if isinstance(end, Outcome) else end
        if error is None:
            self.member.end_launch(None, handled=self.handled)
            if end.verdict.is_without(self.node):
                self.member.dismiss(end.verdict.launch)
            return
        try:
            raise error
        finally:
            self.member.end_launch(verdict, failing=True, handled=self.handled)

    def leave(self):
        if self.node == CONTROL:
            self.member.await_others(list)
        if self.world.happens(0.02, self.node):
            self.fail(ValueError("its results can't be stored"))
        else:
            self.member.leave()

    def hear(self):
        """Let news interrupt the step's own code."""
        if self.stage in ("joins", "own", "ended") and not self.is_dead:
            self.attempt(self.member.raise_news)

    # --- its supervisor

    def receive(self):
        message = self.down.popleft()
        self.world.note(self, "gets", message)
        if message is END:
            self.seat.lose_control("its connection was closed")
            self.link.says("lost", "its connection was closed")
        elif isinstance(message, Answer) and message.is_early:
            self.world.timers.append((self.world.now + 1.0, self.join_again))
        elif isinstance(message, Answer) and message.error is not None:
            self.fail(message.error)
        elif not self.seat.deliver(message):
            self.member.deliver(message)
            if isinstance(message, Answer) and self.stage == "joins":
                self.stage = "own"
        self.pump()
        self.hear()

    def join_again(self):
        if self.stage == "joins":
            self.up.append(self.join)

    def pump(self):
        """Do what can be done now, as `NodeLaunch`."""
        while self.course is not None and not self.is_closing:
            if self.todo:
                answer = self.do(self.todo.popleft())
                if answer is not None:
                    self.todo.extendleft(reversed(self.course.handle(answer, self.world.now)))
            elif self.seat.inbox.empty() or self.course.phase is Phase.OVER:
                return
            else:
                self.take(self.seat.inbox.get_nowait())

    def take(self, what):
        self.handled += isinstance(what, MustEnd)
        self.world.checks.takes(self, what)
        self.todo.extend(self.course.handle(what, self.world.now))
        self.pump()

    def do(self, effect):
        """Carry out an effect; return its answer."""
        match effect:
            case Go() if self.world.happens(0.02, self.node):
                return news.NotBegun("a full disk")
            case Go():
                self.running, self.workers = effect, ""
                self.world.checks.begins(self, effect)
                return news.Prepared("torchrun")
            case Do.START:
                return news.Begun()
            case Stop() | Do.STOP:
                self.workers = "stop"
            case Do.FINISH:
                return news.WorkersEnded(self.ended())
            case Do.CLOSE | Do.CLOSE_NOW:
                self.running, self.is_closing = None, effect is Do.CLOSE
            case Store():
                self.stores = effect
            case Do.GIVE_UP_STORING:
                self.stores = None
            case Outcome() | BaseException():
                self.end = effect
                self.world.checks.ends(self, effect)
            case Do() | Event():
                pass
            case message:
                self.send(message)
        return None

    def ended(self):
        go, plan, ok = self.running, self.course.plan, self.workers == "run"
        if ok:
            self.world.checks.well.add((go.launch, go.generation, self.node))
        return Ended(go.launch, ok, go.generation, exit_codes=dict.fromkeys(plan.spec.ranks, 0), stores=plan.stores)

    def cause(self, kind, rank=None):
        return (
            Failure(
                Cause(kind, self.node, f"host-{self.node}", rank, exception="ValueError: no"),
                self.world.random.choice((0.0, 2.0)),
            ),
        )

    def workers_go_on(self):
        seen = Seen(is_over=True)
        if self.workers == "":
            self.workers, seen = "run", Seen(all_run=True)
        elif self.workers == "run" and self.world.happens(0.08, self.node):
            self.workers, seen = (
                "failed",
                Seen(failed="a rank", failures=self.cause("exception", self.course.plan.spec.ranks[0])),
            )
        self.take(seen)

    def commands_go_on(self):
        fails = self.world.happens(0.05, self.node)
        self.take(Seen(failed="a command", failures=self.cause("command")) if fails else Seen(is_over=True))

    def store(self):
        about, self.stores = self.stores, None
        fails = about.error is None and self.world.happens(0.05, self.node)
        self.send(Stored(about.launch, about.generation, self.cause("store") if fails else ()))

    def has_closed(self):
        self.is_closing = False
        self.pump()

    def disconnect(self):
        self.up.append(END)
        self.stage, self.silent_since = "over", None
        self.world.task_is_over(self)

    # --- faults

    def kill(self):
        """End the task; its supervisor lives, and tells so."""
        if self.is_dead or self.silent_since is not None:
            return
        self.die()
        self.send(Leave("killed", text="its task was killed by SIGKILL"))
        self.link.close()
        self.closes_at += GRACE_S
        self.seat.give_up(None)
        self.pump()

    def drop(self):
        """End both."""
        self.die()
        self.disconnect()

    def die(self):
        self.is_dead = True
        if self.stage != "leaves":
            self.error = ChildProcessError("killed")

    def tell(self):
        """Tell the task to end."""
        if not self.is_dead and self.silent_since is None:
            self.link.says("must_end", "its task got SIGTERM")
            self.hear()

    def silence(self):
        self.silent_since = self.silent_since or self.world.now

    def wake(self):
        self.silent_since = None

    # --- what it may do next

    def acts(self):
        if self.stage == "over" or self.silent_since is not None:
            return []
        return [*([self.receive] if self.down else []), *self.acts_of_launch(), *self.acts_of_step()]

    def acts_of_launch(self):
        phase = None if self.course is None else self.course.phase
        if self.is_closing:
            yield self.has_closed
        elif self.running is not None:
            yield self.workers_go_on
        elif phase is Phase.PREPARING:
            yield self.commands_go_on
        elif phase is Phase.COMPLETING:
            yield lambda: self.take(news.Completed(self.course.plan))
        if self.stores is not None and not self.is_dead:
            yield self.store

    def acts_of_step(self):
        waits = self.member._state is State.WAITING and self.member.broken is None and not self.member._are_alone
        if self.stage == "own":
            yield self.go_on
        elif self.stage == "runs" and self.end is not None:
            yield lambda: self.attempt(self.return_from_run)
        elif self.stage == "ended" and not waits:
            yield lambda: self.attempt(self.leave)
        elif self.stage == "leaves" and not self.is_closing and self.world.may_close(self):
            yield self.disconnect
