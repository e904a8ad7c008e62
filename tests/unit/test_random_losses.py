"""Gangs that lose nodes at random: the real `Gang` and the real course of each node, with queues and a clock of the test.

A seed draws the settings, which message arrives next, how time passes and what fails. No seed may break what `Checks` has.
"""

from collections import defaultdict
from random import Random

import pytest
from lossy_node import END, GRACE_S, Task

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import cause_of
from metaflow_extensions.torchrun.plugins.torchrun.gang.failures import silent
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Gang, Presence
from metaflow_extensions.torchrun.plugins.torchrun.gang.group import Group
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import CONTROL, Abort, Go, Join, Restart, Verdict
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, Rules
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node.outcome import Outcome
from metaflow_extensions.torchrun.plugins.torchrun.node.phases import Phase
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan

SEEDS = range(300)
STEPS, CALM_STEPS = 250, 6000  # in which things may fail, and in which all must end then
SILENCE_S, START_S, NPROC = 30.0, 60.0, 2  # heartbeat_timeout_s, all_nodes_started_timeout, nproc_per_node


class Checks:
    """What must hold, whatever happens."""

    def __init__(self, world):
        self.world, self.gang = world, world.gang
        self.hurt = set()  # nodes on which something has failed
        self.deviates = False  # whether a step has called `run` more or less often than the others
        self.ranks = defaultdict(dict)  # those that began, by launch and generation, and by node
        self.well = set()  # launch, generation and node of workers that have ended well
        self.counted = defaultdict(set)  # the restarts of each launch that count
        self.told = defaultdict(list)  # the outcomes of each launch
        self.apart = set()  # verdicts for nodes that take no part any more

    def sent(self, node, message):
        """Check what the gang tells a node."""
        if isinstance(message, Go):
            self.goes(node, message)
        elif isinstance(message, Restart) and message.cause.category != "preempted":
            self.counted[message.launch].add(message.number)
            assert len(self.counted[message.launch]) <= self.world.max_restarts, "more restarts than max_restarts"
        elif isinstance(message, Verdict) and self.is_out(node) and message.error is not None:
            self.apart.add(id(message))

    def goes(self, told, go):
        assert self.gang.nodes[told].presence is Presence.HERE, f"node {told} is out, and told to go"
        assert self.world.least <= go.group.size <= self.world.size
        assert go.restarts <= go.max_restarts
        for node in go.group.nodes:
            assert self.gang.nodes[node].presence is Presence.HERE, f"node {node} is not there"
            now = self.world.members[node].running
            assert now is None or now is go, f"the workers of generation {now.generation} still run on node {node}"

    def takes(self, task, what):
        """Check that a node which is to start workers is able to."""
        is_meant = isinstance(what, Go) and what.launch == task.course._launch
        if is_meant and what.group.rank_of(task.node) is not None:
            assert task.course.phase in (Phase.READY, Phase.ENDED, Phase.OVER), f"{task.name} does not hear {what}"

    def begins(self, task, go):
        """Check the workers that a node starts."""
        ranks, spec = self.ranks[go.launch, go.generation], task.course.plan.spec
        assert task.node not in ranks, "two tasks of one node"
        ranks[task.node] = spec.ranks
        all_ranks = [rank for each in ranks.values() for rank in each]
        assert len(all_ranks) == len(set(all_ranks)), "a rank twice"
        assert max(all_ranks) < spec.world_size == NPROC * go.group.size

    def ends(self, task, end):
        """Check how a call of `run` has ended on a node."""
        error = end.verdict.error if isinstance(end, Outcome) else end
        if isinstance(error, TorchrunError) and not isinstance(error, GangError):
            cause = cause_of(error)
            assert cause is not None, f"no cause: {error}"
            assert cause.node in self.hurt, f"nothing has failed on node {cause.node}: {error}"
        if isinstance(end, Outcome) and id(end.verdict) not in self.apart:
            told, verdict = self.told[end.verdict.launch], end.verdict
            told.append(end)
            assert error is told[0].verdict.error, f"{task.name} raises another error"
            assert verdict.group == told[0].verdict.group
            shorter, longer = sorted((each.restarts for each in (end, told[0])), key=len)
            assert longer[len(longer) - len(shorter) :] == shorter, "they know of other restarts"
            assert error is not None or self.ended_well(verdict)

    def ended_well(self, verdict):
        last = max(generation for launch, generation in self.ranks if launch == verdict.launch)
        return all((verdict.launch, last, node) in self.well for node in verdict.group.nodes)

    def is_out(self, node):
        return self.gang.nodes[node].presence in (Presence.ABSENT, Presence.OUT)

    def at_end(self):
        """Check the whole run."""
        last = self.world.last
        if not self.hurt:
            calls = sorted(1 if task.member.is_dismissed else task.calls for task in self.world.tasks)
            spares = self.world.num_nodes - self.world.size  # who comes first takes part
            assert calls == sorted([1] * spares + [self.world.launches] * self.world.size)
            assert all(task.error is None for task in self.world.tasks)
        if last[CONTROL].error is None and not self.deviates:
            failed = {node for node, task in last.items() if task.error is not None}
            assert all(self.is_out(node) for node in failed), f"nobody hears of the failure of {failed}"


class World:
    """A gang, its tasks, and what happens to them."""

    def __init__(self, seed):
        self.random = draw = Random(seed)
        self.num_nodes = draw.randint(2, 8)
        spares = min(draw.choice((0, 0, 1, 2)), self.num_nodes - 1)
        self.size = self.num_nodes - spares  # of the group
        least = draw.choice((None, draw.randint(1, self.size)))
        self.least, self.max_restarts = least or self.size, draw.randint(0, 4)
        self.replaces = self.max_restarts > 0 and draw.random() < 0.6
        self.is_local = not self.replaces and draw.random() < 0.5  # else other tasks may come, as on Kubernetes
        self.launches, self.catches = draw.randint(1, 3), draw.random() < 0.3
        self.commands, self.has_to_store = (("true",),) * draw.randint(0, 1), draw.random() < 0.4
        self.fault_rate, self.often = draw.choice((0.0, 0.01, 0.03, 0.06, 0.1)), draw.choice((0.0, 0.3, 1.0))
        rules = Rules(START_S, GRACE_S, spare_nodes=spares, min_nodes=least, replaces=self.replaces)
        self.now, self.is_calm, self.is_open = 1000.0, False, True
        self.gang = Gang(self.num_nodes, lambda pinned: 1, rules, clock=lambda: self.now)
        self.checks = Checks(self)
        # All, and for each node the one that counts, and the one whose connection the channel has.
        self.tasks, self.last, self.members = [], {}, {}
        self.timers, self.kills_at = [], {}
        self.trace = []
        for node in range(self.num_nodes):
            self.start(node)

    def start(self, node, is_second=False):
        self.tasks.append(Task(self, node, f"task {len(self.tasks)} of node {node}"))
        self.last |= {} if is_second else {node: self.tasks[-1]}
        self.tasks[-1].down.extend([] if self.is_open else [END])

    def plan(self, node):
        spec = LaunchSpec("x.py", (), False, NPROC, self.num_nodes, node, "python", group=Group(self.size))
        policy = LaunchPolicy(max_restarts=self.max_restarts)
        return Plan(spec, "", Machine(1), policy, commands=self.commands, stores=self.has_to_store)

    def happens(self, rate, node):
        """Draw whether something fails on a node."""
        fails = not self.is_calm and self.random.random() < rate * self.often
        self.checks.hurt |= {node} if fails else set()
        return fails

    def note(self, task, what, message=""):
        self.trace.append(f"{self.now:.1f} {task.name} {what} {message}"[:400])

    # --- the channel

    def accept(self, task):
        """Handle a task's next message, as `ControlChannel`."""
        message, is_member = task.up.popleft(), self.members.get(task.node) is task
        self.note(task, "says", message)
        if isinstance(message, Join):
            self.join(task, message)
        elif is_member and message is not END:
            self.post(self.gang.handle(task.node, message))
        elif is_member and task.node == CONTROL:
            self.close()
        elif is_member:
            self.lose(task, "its connection was closed")

    def join(self, task, join):
        if self.gang.may_join(join):
            self.members[task.node] = self.last[task.node] = task
            self.post(self.gang.handle(task.node, join))
        else:
            refused, outgoing = self.gang.turn_away(join)
            task.down.append(refused)
            self.post(outgoing)

    def lose(self, task, why):
        del self.members[task.node]
        self.post(self.gang.disconnected(task.node, why))

    def may_close(self, task):
        return task.node != CONTROL or not self.gang.members or self.now > task.closes_at

    def close(self):
        self.is_open = False
        self.checks.hurt.add(CONTROL)  # who comes now finds no control node
        for task in self.tasks:
            task.down.append(END)

    def post(self, outgoing):
        for node, message in outgoing:
            self.checks.sent(node, message)
            if node in self.members:
                self.members[node].down.append(message)

    # --- time, and what a local run does

    def pass_time(self, seconds):
        self.now += seconds
        if not self.is_open:
            return
        due = [each for each in self.timers if each[0] <= self.now]
        self.timers = [each for each in self.timers if each not in due]
        for _, do in due:
            do()
        for task in [each for each in self.members.values() if self.is_overdue(each)]:
            why = "nothing arrived from it"
            task.down += [Abort(silent(task.node, "host", why)), END]
            task.up.clear()
            self.lose(task, why)
        self.post(self.gang.tick())
        if self.is_local and self.tasks[CONTROL].stage not in ("leaves", "over"):
            self.end_lost()

    def is_overdue(self, task):
        return task.silent_since is not None and self.now > task.silent_since + SILENCE_S

    def task_is_over(self, task):
        """Tell the gang that a task has ended, as `ControlSide`; or have another one come, as Kubernetes."""
        if self.replaces and task.error is not None and task.node != CONTROL:
            self.timers.append((self.now + 10.0, lambda: self.bring_again(task.node)))
        elif self.is_local and task.node != CONTROL:
            self.timers.append((self.now + 0.2, lambda: self.report_gone(task)))

    def bring_again(self, node):
        if all(task.stage == "over" for task in self.tasks if task.node == node):
            self.start(node, is_second=True)

    def report_gone(self, task):
        while task.up:  # its own last words say more
            self.accept(task)
        self.post(self.gang.lost(task.node, "its task has ended", self.members.get(task.node) is task))

    def end_lost(self):
        for task in [each for each in self.tasks if each.stage != "over" and each.node in self.gang.without]:
            if self.now > self.kills_at.setdefault(task, self.now + GRACE_S):
                task.disconnect()

    # --- faults

    def hurt_one(self):
        fault = self.random.choice(
            (Task.kill, Task.kill, Task.drop, Task.tell, Task.tell, Task.silence, Task.wake, None)
        )
        task = self.random.choice(self.tasks)
        is_spared = task.node == CONTROL and (fault in (Task.silence, None) or self.random.random() < 0.7)
        if task.stage == "over" or is_spared:
            return
        self.note(task, "is hurt:", fault and fault.__name__)
        self.checks.hurt.add(task.node)
        if fault is not None:
            fault(task)
        if task.node != CONTROL and not self.is_local and fault is (Task.tell if self.replaces else None):
            self.start(task.node, is_second=True)  # as Kubernetes does for a pod that is being deleted

    # --- its course

    def step(self):
        if not self.is_calm and self.random.random() < self.fault_rate:
            self.hurt_one()
        acts = [act for task in self.tasks for act in task.acts()]
        if self.is_open:
            heard = [task for task in self.tasks if task.up and task.silent_since is None]
            acts += [lambda task=task: self.accept(task) for task in heard]
        if not acts or self.random.random() < 0.05:
            self.pass_time(self.random.choice((0.1, 0.5, 1.0, 3.0) if acts else (1.0, 5.0, 16.0)))
        else:
            self.random.choice(acts)()

    def left(self):
        """Return the tasks that must still end: not those that are silent, and of which the gang knows that."""
        known = [task for task in self.tasks if task.silent_since is None or self.members.get(task.node) is task]
        return [task for task in known if task.stage != "over" and (self.is_open or task.silent_since is None)]

    def run(self):
        for count in range(STEPS + CALM_STEPS):
            self.is_calm = count >= STEPS
            if not self.left():
                break
            self.step()
        assert not self.left(), f"they do not end: {[(task.name, task.stage) for task in self.left()]}"
        self.checks.at_end()


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_lost_all_nodes_come_to_the_same_end(seed):
    world = World(seed)
    try:
        world.run()
    except BaseException:
        print(f"seed {seed}", *world.trace, sep="\n")
        raise
