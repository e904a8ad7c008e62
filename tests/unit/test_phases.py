"""A node's phases: every news in every phase, and any order of news, leaves a node that can end, with nothing left."""

import ast
import signal
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from fake_node import ERROR
from hypothesis import given
from hypothesis import strategies as some

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.group import Group
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    CONTROL,
    Ask,
    Ended,
    Failed,
    Go,
    Ready,
    Report,
    Restart,
    Stop,
    Store,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Happened
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node import course, news
from metaflow_extensions.torchrun.plugins.torchrun.node.course import HANDLERS, NodeCourse
from metaflow_extensions.torchrun.plugins.torchrun.node.endings import Broken, GivenUp, MustEnd, TimedOut
from metaflow_extensions.torchrun.plugins.torchrun.node.news import (
    Begun,
    Called,
    Completed,
    Crashed,
    Do,
    NotBegun,
    Prepared,
    Seen,
    WorkersEnded,
)
from metaflow_extensions.torchrun.plugins.torchrun.node.outcome import Outcome
from metaflow_extensions.torchrun.plugins.torchrun.node.phases import LIVING, NEXT, Phase
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan

CAUSE = Cause("exit", 0, "host", 1, 1, 3)
FAILURES = (Failure(CAUSE),)
SPEC = LaunchSpec("/flow/train.py", (), False, nproc=1, num_nodes=2, node_index=1, python="python3")
TOLD = Report("stacks", 0, 0, {})


class Node:
    """A launch on one node, whose processes, task and gang are this object, which checks what the launch wants done.

    Processes that are to begin do so, unless this `fails`. If it `is_mute`, it does not say whether they do.
    """

    def __init__(self, has_commands=False, is_mute=False, number=1):
        commands = (("true",),) * has_commands
        plan = Plan(SPEC, "127.0.0.1", Machine(1), commands=commands, grace_s=7.0, stores=True)
        self.course, self.now = NodeCourse(plan, 0, number, "host"), 0.0
        self.fails, self.is_mute = False, is_mute
        self.done = []  # all effects
        self.running = None  # the commands, or a generation's *go*
        self.generation = None  # the last that has begun
        self.stores = False  # whether the task was asked to
        self.verdict = None

    @property
    def phase(self):
        return self.course.phase

    def take(self, news):
        """Hand on news, as `NodeLaunch` does: none of processes that are gone."""
        if isinstance(news, Seen) and self.running is None:
            return
        if isinstance(news, Verdict) and not self.is_over:
            self.verdict = news
        for effect in self.course.handle(news, self.now):
            answer = self.do(effect)
            if answer is not None:
                self.take(answer)

    @property
    def is_over(self):
        return bool(self.done) and isinstance(self.done[-1], Outcome | BaseException)

    def all_of(self, *kinds):
        return [each for each in self.done if isinstance(each, kinds)]

    def do(self, effect):
        """Check that an effect is possible now; return its answer."""
        assert not self.is_over, "nothing follows on the end"
        former, self.done = self.done, [*self.done, effect]
        match effect:
            case Do.START_COMMANDS:
                self.begin(effect)
                return NotBegun("no more processes") if self.fails else None
            case Go():
                self.begin(effect)
                return None if self.is_mute else Prepared("torchrun")
            case Do.START:
                return NotBegun("no more processes") if self.fails else Begun()
            case Ask():
                assert isinstance(self.running, Go)
            case Stop() | Do.STOP:
                assert isinstance(self.running, Go)
                since = former[former.index(self.running) :]
                assert not [each for each in since if each is Do.STOP or isinstance(each, Stop)], "it stops once"
                return Seen([TOLD]) if isinstance(effect, Stop) else None
            case Do.FINISH:
                assert isinstance(self.running, Go)
                assert effect not in former[former.index(self.running) :]
                return WorkersEnded(Ended(0, True, self.running.generation, exit_codes={1: 0}), [TOLD], True)
            case Do.CLOSE | Do.CLOSE_NOW:
                assert self.running is not None
                self.running = None
            case Store():
                assert self.running is None
                self.stores = True
            case Do.GIVE_UP_STORING:
                assert self.stores
                self.stores = False
            case Ready():
                assert effect not in former, "once"
            case Report(kind="started" | "wrote"):
                assert isinstance(self.running, Go)
                assert effect not in former, "once in each generation"
                assert effect.generation == self.running.generation
            case Failed():
                assert effect.failures
                assert effect.generation in (None, getattr(self.running, "generation", None))
            case Ended():
                assert effect.generation is not None or self.running is None, "nothing is left"
                assert effect.generation in (None, self.generation)
        return None

    def begin(self, what):
        assert self.running is None, "the last processes were closed"
        assert not self.stores, "the upload was given up"
        self.running = what
        self.generation = what.generation if isinstance(what, Go) else self.generation

    def end(self):
        """End it, unless it has ended, and check that nothing is left, and that the gang knows of it."""
        self.take(Crashed(OSError("a bug")))
        assert (self.phase, self.running) == (Phase.OVER, None)
        (end,) = self.all_of(Outcome, BaseException)
        assert self.done[-1] is end
        error = end.verdict.error if isinstance(end, Outcome) else end
        assert not (error and self.stores), "the upload was given up"
        given_up = [each for each in self.all_of(Ended) if each.generation is None]
        if self.verdict is None:
            assert given_up == [self.done[-2]] == [Ended(0, ok=False)], "the gang hears of it, when nothing is left"
        else:
            assert given_up == [each for each in self.all_of(Failed) if each.given_up] == []
        for each in NEWS:
            assert self.course.handle(each, 0.0) == [], "it does no more"


RESTART = Restart(0, 1, 1, 2, 1.0, CAUSE)
GO, STOP, STORE = Go(0, 0, 1, "gang", 0, 1), Stop(0, 0), Store(0, 0)
OVER, WRITES = Seen(is_over=True), Seen([TOLD], all_run=True, has_written=True)
FAILS = Seen([Report("command", 0)], failed="rank 1 exited with code 3", failures=FAILURES)
CALLED = Called(None)
WAYS = {
    Phase.BEGINNING: [],
    Phase.PREPARING: [CALLED],
    Phase.COMPLETING: [CALLED, OVER],
    Phase.READY: [CALLED],
    Phase.STARTING: [CALLED, GO],
    Phase.RUNNING: [CALLED, GO],
    Phase.STOPPING: [CALLED, GO, STOP],
    Phase.ENDED: [CALLED, GO, OVER],
    Phase.STORING: [CALLED, GO, OVER, STORE],
    Phase.OVER: [CALLED, Verdict(0)],
}
NEWS = [
    CALLED,
    Called(ERROR),
    GO,
    Go(0, 1, 1, "gang", 1, 2),
    Ask(0, 0, "stacks", {}),
    Ask(0, 1, "stacks", {}),
    STOP,
    Stop(0, 0, "rank 3 failed", 1, signal.SIGUSR1, "exit"),
    RESTART,
    STORE,
    Store(0, 0, ERROR, 3.0),
    Verdict(0),
    Verdict(0, ERROR),
    Completed(Plan(SPEC, "127.0.0.1", Machine(1))),
    Seen(),
    Seen([TOLD], all_run=True),
    WRITES,
    FAILS,
    OVER,
    Broken(ERROR),
    MustEnd("its machine goes"),
    TimedOut("the step's @timeout is over"),
    GivenUp(None),
    GivenUp(CAUSE),
    Crashed(OSError("a full disk")),
]
ANSWERS = [Prepared("torchrun"), Begun(), NotBegun("a full disk"), WorkersEnded(Ended(0, True, 0))]


def node_in(phase):
    """Return a node in a phase."""
    node = Node(phase in (Phase.PREPARING, Phase.COMPLETING), is_mute=phase is Phase.STARTING)
    for each in WAYS[phase]:
        node.take(each)
    assert node.phase is phase
    return node


def after(*former):
    """Return all phases that may follow on some, also by way of others, and themselves."""
    found, more = set(), set(former)
    while more:
        found |= more
        more = {after for before in more for after in NEXT[before]} - found
    return found


def test_all_news_and_all_phases_are_tried_here():
    kinds = set(get_args(news.News))
    assert {type(each) for each in NEWS + ANSWERS} == kinds == set(HANDLERS)
    assert set(WAYS) == set(Phase) == after(Phase.BEGINNING)


@pytest.mark.parametrize(
    ("phase", "what"), list(product(WAYS, NEWS + ANSWERS)), ids=lambda each: getattr(each, "name", None)
)
def test_every_news_in_every_phase_does_what_the_table_says_or_nothing(phase, what):
    node = node_in(phase)
    kept = vars(node.course).keys() - {"_now", "_out"}
    before = {name: vars(node.course)[name] for name in kept}, len(node.done)
    node.take(what)
    if phase not in HANDLERS[type(what)]:
        assert ({name: vars(node.course)[name] for name in kept}, len(node.done)) == before
    assert node.phase in after(phase)
    node.end()


P = Phase
FOLLOWS = [
    (P.BEGINNING, CALLED, "Ready"),
    (P.BEGINNING, Called(ERROR), "PREPARE_WARM Ended raise"),
    (P.PREPARING, Seen([TOLD]), "Stacks"),
    (P.PREPARING, FAILS, "Command worker_failed Failed"),
    (P.PREPARING, NotBegun("a full disk"), "worker_failed Failed"),
    (P.PREPARING, OVER, "CLOSE_NOW COMPLETE"),
    (P.PREPARING, Verdict(0, ERROR), "stopping CLOSE PREPARE_WARM return"),
    (P.PREPARING, MustEnd("its machine goes"), "Failed CLOSE Ended raise"),
    (P.COMPLETING, Completed(Plan(SPEC, "127.0.0.1", Machine(1))), "Ready"),
    (P.READY, GO, "Go command START"),
    (P.READY, replace(GO, group=Group(1)), ""),
    (P.READY, MustEnd("its machine goes"), "Failed Ended raise"),
    (P.READY, TimedOut("too long"), "Failed PREPARE_WARM Ended raise"),
    (P.STARTING, NotBegun("a full disk"), "CLOSE_NOW worker_failed Ended"),
    (P.STARTING, Prepared("torchrun"), "command START"),
    (P.STARTING, Crashed(OSError("a bug")), "Failed CLOSE Ended raise"),
    (P.RUNNING, WRITES, "Started PREPARE_WARM Wrote Stacks"),
    (P.RUNNING, FAILS, "Command worker_failed Failed STOP"),
    (P.RUNNING, STOP, "Stop Stacks"),
    (P.RUNNING, OVER, "FINISH Stacks Started PREPARE_WARM Wrote Ended CLOSE_NOW"),
    (P.RUNNING, Ask(0, 0, "stacks", {}), "Ask"),
    (P.RUNNING, Ask(0, 1, "stacks", {}), ""),
    (P.RUNNING, MustEnd("its machine goes"), "stopping Failed"),
    (P.RUNNING, TimedOut("too long"), "Failed"),
    (P.RUNNING, Broken(ERROR), "CLOSE PREPARE_WARM Ended raise"),
    (P.RUNNING, GivenUp(None), "CLOSE Ended raise"),
    (P.RUNNING, GivenUp(CAUSE), "Failed CLOSE Ended raise"),
    (P.RUNNING, Verdict(0, ERROR), "CLOSE PREPARE_WARM return"),
    (P.STOPPING, Ask(0, 0, "stacks", {}), "Ask"),
    (P.STOPPING, WRITES, "Started PREPARE_WARM Stacks"),
    (P.STOPPING, FAILS, "Command"),
    (P.STOPPING, OVER, "FINISH Stacks Ended CLOSE_NOW"),
    (P.ENDED, Go(0, 1, 1, "gang", 1, 1), "Go command START"),
    (P.ENDED, RESTART, "restart"),
    (P.ENDED, STORE, "Store"),
    (P.ENDED, Verdict(0), "PREPARE_WARM return"),
    (P.STORING, STOP, "GIVE_UP_STORING"),
    (P.STORING, STORE, "Store"),
    (P.STORING, MustEnd("its machine goes"), "Failed GIVE_UP_STORING Ended raise"),
    (P.STORING, Verdict(0), "PREPARE_WARM return"),
    (P.STORING, Verdict(0, ERROR), "GIVE_UP_STORING PREPARE_WARM return"),
]


def word(effect):
    if isinstance(effect, Do | Event):
        return effect.name if isinstance(effect, Do) else effect.kind
    if isinstance(effect, Outcome | BaseException):
        return "return" if isinstance(effect, Outcome) else "raise"
    return effect.kind.capitalize() if isinstance(effect, Report) else type(effect).__name__


@pytest.mark.parametrize(("phase", "what", "effects"), FOLLOWS)
def test_what_follows_on_news_and_in_which_order(phase, what, effects):
    node = node_in(phase)
    before = len(node.done)
    node.take(what)
    assert " ".join(map(word, node.done[before:])) == effects


def test_the_line_of_a_restart_has_one_line_of_the_exception_and_the_end_counts_what_has_happened():
    cause = replace(CAUSE, exception="RuntimeError: CUDA error\nCompile with more\n", kind="exception")
    node = node_in(Phase.ENDED)
    node.course._node = CONTROL  # which tells of the end
    node.is_mute = True
    node.take(replace(RESTART, cause=cause))
    node.take(Verdict(0, ERROR))
    said = {each.kind: each.text for each in node.all_of(Event)}
    assert said["restart"].startswith("restart 1 of 2: all workers start again in 1 s, because rank 1 ")
    assert said["restart"].endswith(" failed with RuntimeError: CUDA error")
    assert "restart" not in said["ended"], "it was announced, and did not happen"


def test_a_restart_says_what_it_waits_for_and_then_which_nodes_take_part():
    node, lost = node_in(Phase.ENDED), Cause("terminated", 0, "host", exception="its machine goes")
    for each in (Restart(0, 2, 1, 1, 0.0, lost, (1, 3)), Go(0, 1, 1, "gang", 2, 2, left=(1,), came=(2,)), OVER):
        node.take(each)
    node.take(Verdict(0))
    first, then = [each.text for each in node.all_of(Event) if each.kind == "restart"]
    assert first.startswith("all workers start again when nodes 1, 3 have started again, because node 0 (host host) ")
    assert then == "node 2, a spare, takes the place of node 1"
    ((generation, left, came),) = [(each["generation"], each["left"], each["came"]) for each in node.done[-1].restarts]
    assert (generation, left, came) == (2, [1], [2])


def test_a_node_that_must_end_knows_that_the_others_may_go_on():
    texts = []
    for max_restarts in (0, 1):
        node = node_in(Phase.RUNNING)
        node.course.plan = replace(node.course.plan, policy=replace(node.course.plan.policy, max_restarts=max_restarts))
        for _ in range(2):
            node.take(MustEnd("its machine goes"))
        texts.append(str(node.done[-1]))
    assert "With Metaflow's @retry a new gang starts" in texts[0]
    assert texts[1].endswith("The other nodes go on without it if they can.")


def test_a_second_order_to_end_ends_at_once_and_each_generation_tells_anew():
    node = node_in(Phase.RUNNING)
    for each in (WRITES, WRITES, OVER, Go(0, 1, 1, "gang", 1, 1), WRITES, *[MustEnd("its machine goes")] * 2):
        node.take(each)
    second = "Go command START Started Wrote Stacks stopping Failed Failed CLOSE Ended raise"  # no restart is left
    assert " ".join(map(word, node.done)).endswith(f"Stacks Stacks FINISH Stacks Ended CLOSE_NOW {second}")


@pytest.mark.parametrize(("group", "ranks"), [(Group(2), [1]), (Group(1, (0,)), [0]), (Group(1), [])])
def test_a_node_has_the_ranks_of_its_place_in_the_group(group, ranks):
    """That is node 1, whose workers have another place after a loss; a spare has none."""
    node = node_in(Phase.ENDED)
    node.take(Go(0, 1, 1, "gang", 1, 1, group=group))
    begun = [node.course.plan.spec.ranks] if node.phase is Phase.RUNNING else []
    assert [rank for each in begun for rank in each] == ranks


@pytest.mark.parametrize("phase", [Phase.ENDED, Phase.STOPPING])
def test_the_error_that_store_has_announced_is_raised_when_the_gang_breaks(phase):
    node, error = node_in(phase), LaunchFailed("Rank 3 failed.")
    for each in (Store(0, 0, error), Broken(ERROR)):
        node.take(each)
    assert node.done[-1] is error


@pytest.mark.parametrize("phase", WAYS)
@pytest.mark.parametrize(
    "late",
    [Go(1, 0, 1, "gang", 0, 0), Ask(1, 0, "a", {}), Stop(1, 0), replace(RESTART, launch=1), Store(1, 0), Verdict(1)],
)
def test_messages_of_another_launch_do_nothing_in_any_phase(phase, late):
    node = node_in(phase)
    assert node.course.handle(late, 0.0) == []
    assert node.phase is phase
    node.end()


@given(some.lists(some.tuples(some.sampled_from(NEWS), some.booleans()), max_size=12), some.booleans())
def test_a_node_ends_after_any_order_of_news(many, with_commands):
    node = Node(with_commands)
    for each, fails in [(CALLED, False), *many]:
        before, node.fails = node.phase, fails
        node.take(each)
        assert node.phase in after(before)
        assert isinstance(node.running, Go) == (node.phase in LIVING)
    node.end()


def test_the_outcome_counts_from_the_first_generation_and_tells_of_the_last():
    node = node_in(Phase.READY)
    for now, each in ((10.0, GO), (12.0, OVER), (20.0, Go(0, 1, 1, "gang", 1, 1))):
        node.now, node.fails = now, now == 20.0
        node.take(each)
    node.now = 50.0
    node.take(Verdict(0, ERROR))
    outcome = node.done[-1]
    assert (outcome.command, outcome.exit_codes, outcome.duration_s) == ("torchrun", {}, 40.0)
    assert [each.stores for each in node.all_of(Ended)] == [False, True], "what the double told, and a failed start"
    never = node_in(Phase.READY)
    never.now = 50.0
    never.take(Verdict(0, ERROR))
    assert never.done[-1].duration_s == 0.0


def test_the_control_node_says_why_it_stops_and_how_long_a_launch_took_that_went():
    node = Node(number=0)
    for each in (CALLED, GO, STOP, Stop(0, 0, "rank 3 failed", 1, None, "exit"), OVER, Verdict(0, ERROR)):
        node.take(each)
    told = [each.kind for each in node.all_of(Event)]
    assert told == ["facts", "chosen", "command", "stopping", "ended"]
    node = Node(number=0)
    for each in (CALLED, Verdict(0, ERROR)):
        node.take(each)
    assert node.all_of(Event) == []


@pytest.mark.parametrize(("node", "says"), [(0, True), (1, False)])
def test_a_node_says_that_its_commands_stop_for_another_one_alone(node, says):
    preparing = node_in(Phase.PREPARING)
    preparing.take(Verdict(0, LaunchFailed("It failed.", Cause("command", node, "host").as_dict())))
    assert bool([each for each in preparing.all_of(Event) if each.kind == "stopping"]) is says


def test_the_error_that_store_announces_has_the_gangs_events():
    error, event = LaunchFailed("Rank 3 failed."), Happened("exited", 1.0, 2.0, "exited with code 1")
    node_in(Phase.ENDED).take(Store(0, 0, error, 3.0, (event,)))
    assert error.events == [asdict(event)]


# What the pure modules may import besides our own: nothing that waits, reads or writes.
PURE = {"__future__", "collections.abc", "dataclasses", "enum", "typing"}


def test_nothing_waits_reads_or_writes_where_it_is_decided():
    for module in (course, news):
        nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))))
        imports = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        imports |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
        assert imports <= PURE
        assert not [node for node in nodes if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
        assert not {node.id for node in nodes if isinstance(node, ast.Name)} & {"open", "print", "input"}
