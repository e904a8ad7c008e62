"""Whatever nodes say, and whatever is lost, late or doubled: what must hold of a gang. ``EXAMPLES=10000`` tries more."""

import json
import os
from dataclasses import replace

from gang_of import STOP_S, TASKS, WORDS, GangOf, crash, of_node, preemption
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import cause_of
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Phase
from metaflow_extensions.torchrun.plugins.torchrun.gang.limits import INDEX_S, SAVE_S
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import from_wire, to_wire
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Presence

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))
IN_GANG = (Presence.HERE, Presence.GONE)
FOREVER, START_S, LAUNCH_S = float("inf"), 50.0, 40.0
# How long a launch may take whose nodes are silent, with two restarts, and of what it stores.
LAUNCH_ENDS_S = 3 * (LAUNCH_S + STOP_S + START_S) + SAVE_S + INDEX_S
PEER = "RuntimeError: gloo: Connection closed by peer"  # it follows from another failure
# What has happened before: from the first event on, few examples would come far. With None nobody has come.
STORIES = [None, "", "killed 1", "killed 1, all_ended 0", "all_ended, give_up 0", "all_ended, give_up 0, raises 0"]
WORDS |= {
    "peer": lambda gang, node: gang.ended(node, crash(node, PEER)),
    "fails": lambda gang, node: gang.failed(node, crash(node)),
    "has_failed": lambda gang, node: gang.failed(node, crash(node), age_s=15.0),
    "peer_failed": lambda gang, node: gang.failed(node, crash(node, PEER), age_s=15.0),
    "deserts": lambda gang, node: gang.leave(node, preemption(node)),
    "say_again": lambda gang, node, back: gang.send(gang.tasks[node], gang.tasks[node].said[-back]),
    "calls": lambda gang, node, call: gang.say(
        node,
        say.Report(
            "answer",
            *gang.about(node),
            {"id": gang.tasks[node].waits, "found": call},
        ),
    ),
    "ask_stop": lambda gang: gang.post(gang.state.ask(str(next(TASKS)), "stop", {})),
    "hold": lambda gang, node: setattr(gang.tasks[node], "held", []),
}


class Task:
    """A task of a node, and its supervisor. Its stages: own (code), in (`run`), own, done, over; or broken, or killed."""

    def __init__(self, node, read):
        self.node, self.read, self.name = node, read, f"task {next(TASKS)}"  # it has read so many messages
        self.stage, self.launch, self.prepares, self.waits = "own", 0, False, False  # the last: in `stopping`
        self.go = self.store = None  # of the workers that live, and of what it is to store
        self.said, self.held = [], None  # all, and what waits while its line is cut

    def leave_run(self, stage="own"):
        self.stage, self.launch, self.go, self.store, self.prepares = stage, self.launch + 1, None, None, False


class AnyGang(RuleBasedStateMachine, GangOf):
    """Nodes that may say anything at any time, and a network that holds up, doubles and drops what they say."""

    @initialize(
        num_nodes=st.sampled_from([3, 2, 4, 1]),
        spares=st.sampled_from([0, 1]),
        least=st.sampled_from([None, None, 1, 2]),
        rules=st.fixed_dictionaries({"replaces": st.booleans(), "deadline": st.sampled_from([FOREVER, 1200.0])}),
        max_restarts=st.sampled_from([2, 1, 0]),
        hang_timeout_s=st.sampled_from([None, 20.0]),
        stores=st.sampled_from([True, True, False]),
        story=st.sampled_from(STORIES),
    )
    def begin(self, num_nodes, spares, least, rules, max_restarts, hang_timeout_s, stores, story):
        spares = min(spares, num_nodes - 1)
        self.size, self.stores, self.max_restarts = num_nodes - spares, stores, max_restarts
        self.least = min(least or self.size, self.size)
        self.policy = {"timeout_s": LAUNCH_S, "max_restarts": max_restarts, "hang_timeout_s": hang_timeout_s}
        rules = {**rules, "spare_nodes": spares, "min_nodes": least and self.least, "started_timeout_s": START_S}
        self.tasks, self.old = {}, []  # the member of each node, and those before
        self.errors, self.aborted, self.restarts = {}, None, {}  # by launch; with what; by launch
        self.restarts_for = None  # what was checked last
        self.failures = {}  # launch -> when what has failed in it, and of which task, since its last restart
        self.last_go, self.stopped = None, {}  # launch and generation -> when the gang has stopped it
        GangOf.__init__(self, num_nodes, join=False, sees=self.check, **rules)
        for node in range(num_nodes) if story is not None else ():
            self.play(f"come {node}, ready {node}")
        self.hear()
        self.play(story if story and num_nodes > 1 else "+0")
        self.hear()

    def check(self, node, message):
        if getattr(message, "error", None) is None:  # an error is no other's equal
            assert from_wire(json.loads(json.dumps(to_wire(message)))) == message, "it does not arrive as it was sent"
        match message:
            case say.Go():
                self.check_go(node, message)
            case say.Stop():
                self.stopped[message.launch, message.generation] = self.now
            case say.Abort(error=error):
                self.aborted = self.aborted or error
                assert error is self.aborted, "nodes hear of different failures"
            case say.Store(error=error) | say.Verdict(error=error) if error or type(message) is say.Verdict:
                if error is not None and self.state.nodes[node].presence not in IN_GANG:
                    return  # it is told apart
                is_first, launch = message.launch not in self.errors, self.state.launch
                assert error is self.errors.setdefault(message.launch, error), "nodes have different errors"
                if is_first and error is not None and message.launch == launch.number and launch.generation >= 0:
                    self.check_cause(message.launch, cause_of(error))

    def post(self, outgoing):
        launch = self.state.launch
        known = self.restarts.setdefault(launch.number, [])
        if (cause := launch.restarts_for) is not None and cause is not self.restarts_for:
            self.restarts_for = cause
            self.check_cause(launch.number, cause)
            known.append(cause)
            counted = sum(each.category != "preempted" for each in known)
            which = f"restart {counted} of {self.max_restarts}: " if cause.category != "preempted" else ""
            assert launch.again.partition("all workers")[0] == which
            assert counted <= self.max_restarts
        return GangOf.post(self, outgoing)

    def check_go(self, node, go):
        assert go.cause is (self.restarts[go.launch][-1] if self.restarts[go.launch] else None)
        nodes, here = {*go.group.nodes}, {each.index for each in self.state.nodes if each.presence is Presence.HERE}
        assert here >= {node, *nodes}, "a group with a lost node"
        if go is not self.last_go:
            number = (go.launch, go.generation)
            assert self.last_go is None or number > (self.last_go.launch, self.last_go.generation), "another group"
            before, able = {*self.last_go.group.nodes} if self.last_go else set(), here & self.state.ready
            assert able & before <= nodes, "who took part does not stay"
            assert all(came < waits for came in nodes - before for waits in able - nodes), "not the first others come"
            self.last_go = go
        assert [go.group.rank_of(each) for each in sorted(nodes)] == [*range(go.group.size)]
        assert self.state.broken is None
        assert self.least <= go.group.size <= self.size
        assert go.generation <= go.max_restarts
        for task in [each for each in (*self.tasks.values(), *self.old) if each.go not in (None, go)]:
            silent_s = self.now - self.stopped.get((task.go.launch, task.go.generation), FOREVER)
            assert silent_s >= STOP_S, f"node {task.node} has workers of two generations at once"

    def check_cause(self, launch, cause):
        """Check that no other failure came before the cause, and that it follows from none."""
        known = self.failures.pop(launch, [])
        # Others go on without a task that they have left out, or that was not in this launch.
        meant = [task for task in self.tasks.values() if self.state.nodes[task.node].presence in IN_GANG]
        origins = [(at, each) for at, each, task in known if task in meant and not each.is_consequence]
        if cause is None or cause.is_consequence:
            assert not origins, f"{cause} follows from {origins}"
            return
        if not origins and cause in self.restarts.get(launch, [])[-1:]:
            return  # too few have come for that restart
        found = [at for at, each, _ in known if each.is_same_event(cause)]
        if cause.kind in ("timeout", "step_timeout", "hang"):
            found = [1000.0 + record.at_s for record in self.recorded("timeout", "hang")[-1:]]
        assert found, f"nobody has said {cause}"
        assert not [each for at, each in origins if at < min(found) - 0.01], f"before {cause} came {origins}"

    def living(self):
        return [task for task in self.tasks.values() if task.stage != "over" or task.held is not None]

    def hear(self):
        for task in self.living():
            while task.held is None and task.read < len(self.sent[task.node]):
                task.read += 1
                self.obey(task, self.sent[task.node][task.read - 1])

    def obey(self, task, message):
        is_own = task.stage == "in" and getattr(message, "launch", None) == task.launch
        match message:
            case say.Abort() if task.stage in ("own", "in") or (task.stage, task.node) == ("done", say.CONTROL):
                task.leave_run("broken")
            case say.Go() if is_own:
                task.go = message if message.group.rank_of(task.node) is not None else None
                assert task.go is None or not task.prepares, "go for a node whose commands run"
                task.waits = False
            case say.Ask() | say.StopAt() if is_own and task.go is not None:
                task.waits = message.id if isinstance(message, say.Ask) and message.what == "stop" else False
            case say.Store() if is_own and task.go is None:
                task.store = message
            case say.Verdict() if is_own:
                task.leave_run()

    def about(self, node, launch=None, generation=None):
        about = self.tasks[node].go or self.tasks[node].store
        return self.tasks[node].launch, about.generation if about else None

    def say(self, node, message):
        task = self.tasks[node]
        match message:
            case say.Ready():
                task.stage, task.prepares = "in", False
            case say.Report(kind="before_run"):
                task.stage, task.prepares = "in", True
            case say.Failed():
                task.prepares = False
            case say.Ended():
                task.go, message = None, replace(message, stores=self.stores)
            case say.Stored():
                task.store = None
            case say.Leave():
                message = replace(message, how="failed") if task.stage == "broken" else message
                task.stage = {"done": "done", "killed": "killed"}.get(message.how, "over")
                task.prepares, task.store = False, None
        self.send(task, message)

    def send(self, task, message):
        assert from_wire(json.loads(json.dumps(to_wire(message)))) == message, "it does not arrive as it was sent"
        task.said.append(message)
        self.arrive(task, message) if task.held is None else task.held.append(message)

    def arrive(self, task, message):
        launch = self.state.launch
        if self.tasks[task.node] is not task:
            return
        is_current = getattr(message, "launch", launch.number) == launch.number and self.state.phase is not Phase.IDLE
        awaited = {say.Ended: launch.running, say.Stored: launch.stores}.get(type(message), [task.node])
        if is_current and getattr(message, "generation", None) in (None, launch.generation) and task.node in awaited:
            self.note(task, *[(each.age_s, each.cause) for each in getattr(message, "failures", ())])
        if type(message) is say.Leave and self.state.nodes[task.node].presence is Presence.HERE:
            self.note(task, (0.0, message.cause or of_node("lost", task.node, message.text)))
        GangOf.say(self, task.node, message)
        if type(message) is say.Leave and (task.node, message.how) == (say.CONTROL, "failed"):
            assert self.state.phase is Phase.IDLE, "who is left would wait for a verdict for ever"

    def note(self, task, *found):
        whose = task if task.node in self.state.ready | self.state.launch.running else None
        known = self.failures.setdefault(self.state.launch.number, [])
        known.extend((self.now - age_s, cause, whose) for age_s, cause in found)

    def come(self, node):
        task = Task(node, len(self.sent[node]))
        join = say.Join(node, f"host-{node}", task.name)
        if (answer := self.turn_away(join)) is not None:
            assert answer.error is not None
            return
        self.old += [self.tasks[node]] if node in self.tasks else []
        self.tasks[node] = task
        self.say(node, join)

    def prepare(self, node):
        GangOf.prepare(self, node, self.tasks[node].launch)

    def ready(self, node, **said):
        GangOf.ready(self, node, self.tasks[node].launch, **self.policy, **said)

    def give_up(self, node, cause=None):
        task, number = self.tasks[node], self.tasks[node].launch
        GangOf.give_up(self, node, cause)
        if (task.stage, task.launch) == ("in", number):
            task.leave_run()

    def release(self, node):
        said, self.tasks[node].held = self.tasks[node].held, None
        for message in said:
            self.arrive(self.tasks[node], message)

    def cut(self, node):
        """End a task and its supervisor; of workers that this has ended the gang hears first."""
        task = self.tasks[node]
        if task.stage == "killed" and task.go is not None:
            self.stop(node)
        task.stage, task.go, task.held = "over", None, None
        if self.state.nodes[node].presence is Presence.HERE:
            self.note(task, (0.0, of_node("lost", node, "its connection was closed")))
        GangOf.cut(self, node)

    def pass_time(self, seconds):
        for _ in range(max(1, int(seconds // 5))):
            GangOf.pass_time(self, min(seconds, 5.0))

    def must_do(self, task):
        """Return what is next for a task; None if it waits."""
        if task.held is not None or task.stage == "killed":
            return "cut" if task.held is None else "release"
        if task.prepares:
            return "ready"
        if task.go is not None or task.store is not None:
            return "stop" if task.go is not None else "stored"
        waits = task.node == say.CONTROL and task.stage == "done" and "alone" not in self.farewells(say.CONTROL)
        return None if waits else {"own": "done", "done": "leave", "broken": "leave"}.get(task.stage)

    def acts(self):
        yield "+1"  # hypothesis draws what is first and last more often
        yield from (f"come {node}" for node in range(self.num_nodes))
        yield from ("+5", "+30", "+100", "ask_stop")
        for task in self.living():
            must, runs, words = self.must_do(task), task.go is not None, ["cut"] + ["hold"] * (task.held is None)
            words += [must] * {None: 0, "stop": 1, "done": 1, "cut": 1}.get(must, 8)
            words += (["ready"] * 8 + ["prepare", "prepare", "differ", "raises", "deserts"]) * (must == "done")
            words += (["all_ended"] * 4 + ["crash", "peer", "told", "fails", "has_failed", "peer_failed"]) * runs
            words += ["give_up", "quit", "killed"] * (task.stage == "in") + ["killed"] * runs
            yield from (f"calls {task.node} {call}" for call in (7, 9, 0) if runs and task.waits)
            words += ["commands_fail"] * task.prepares + ["store_badly"] * bool(task.store)
            yield from (f"{word} {task.node}" for word in words)
            for back, message in enumerate(task.said[:-6:-1], 1):
                if type(message) in (say.Failed, say.Ended, say.Stored, say.Leave):
                    yield f"say_again {task.node} {back}"

    @rule(data=st.data())
    def something_happens(self, data):
        self.play(data.draw(st.sampled_from([*self.acts()])))
        self.hear()
        waiting = {task.node for task in self.living() if task.waits and task.held is None}
        waits_for = {node for each in self.state._questions.values() for node in each.nodes}
        if self.state.phase is Phase.RUNNING:
            assert self.state.launch.running & waiting <= waits_for, "ranks wait in stopping() for ever"

    def teardown(self):
        if not hasattr(self, "tasks"):
            return
        for task in self.living():  # each launch ends in its time, also if nodes say nothing more
            task.held = task.held or []
        self.pass_time(LAUNCH_ENDS_S)
        may_store = self.state.launch.failing_with is None and self.state.rules.deadline == FOREVER
        assert self.state.phase in (Phase.IDLE, *[Phase.STORING] * may_store), "it does not end"
        for _ in range(12):  # and when all do what they must, none waits
            for task in self.living():
                if (must := self.must_do(task)) is not None:
                    self.play(f"{must} {task.node}")
                self.hear()
            self.pass_time(START_S)
        left = [(task.node, task.stage) for task in self.living()]
        assert not left, f"they wait for ever: {left}"


def test_whatever_nodes_say_and_the_network_does_the_gang_keeps_its_promises():
    run_state_machine_as_test(AnyGang, settings=settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None))
