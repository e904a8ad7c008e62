"""A gang whose nodes say what a test has them say, by a clock that the test holds."""

import itertools
from dataclasses import fields

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, Rules

GRACE_S, STOP_S = 30.0, 45.0  # of the workers, and of a node
FACTS = {"torch": "2.13.0", "python": "3.11", "devices": "none", "contents": "f00"}
FIELDS = {"nproc": 2, "digest": "abc", "master_port": None}
POLICY = {each.name for each in fields(LaunchPolicy)}
OF_THE_GANG = {each.name for each in fields(Rules)} | {"taken", "join"}
NOT_STORED = "has ended well, but its value could not be stored"
NO_DATA = "before_run 1/2 (make data) exited with code 2"
UNREACHED = {"address": "10.0.0.1", "port": 29500, "why": "timed out"}
TASKS = itertools.count(1)


def crash(node=1, text="ValueError: loss is nan", kind="exception", code=1):
    return Cause(kind, node, f"host-{node}", node * 2, 0, code, text)


def of_node(kind, node=1, text="KeyError: 'x'"):
    """Return a failure of the node itself, and of no rank."""
    return Cause(kind, node, f"host-{node}", exception=text)


def preemption(node=1):
    return of_node("terminated", node, "its task got SIGTERM")


def failures(*causes, age_s=0.0):
    return tuple(Failure(cause, age_s) for cause in causes)


class GangOf:
    """A gang, and what its nodes have been sent. They say all of the last launch that they have called, if not told else."""

    def __init__(self, num_nodes=3, taken=(), join=True, sees=None, now=1000.0, **rules):
        self.now, self.num_nodes, self.sees = now, num_nodes, sees  # each message
        self.ports, self.taken = iter(range(40001, 60000)), set(taken)
        self.state = Gang(num_nodes, self._pick, Rules(**{"grace_s": GRACE_S, **rules}), lambda: self.now)
        self.sent = {node: [] for node in range(num_nodes)}
        self.calls = dict.fromkeys(range(num_nodes), 0)  # the last launch that each has called
        self.join(*range(num_nodes) if join else ())

    def _pick(self, pinned):
        return next(self.ports) if pinned is None else None if pinned in self.taken else pinned

    def post(self, outgoing):
        for node, message in outgoing:
            self.sent[node].append(message)
            if self.sees is not None:
                self.sees(node, message)
        return self

    def play(self, story):
        """Do what it says, as in "lost 1, stop 0 2, +30.5": `WORDS` or methods with nodes, and seconds; return itself."""
        for what, *numbers in map(str.split, story.split(",")):
            act = WORDS.get(what, getattr(type(self), what, None))
            self.pass_time(float(what)) if what[0] == "+" else act(self, *map(int, numbers))
        return self

    def pass_time(self, seconds):
        self.now += seconds
        return self.post(self.state.tick())

    def say(self, node, message):
        return self.post(self.state.handle(node, message))

    def join(self, *nodes):
        for node in nodes:
            self.say(node, say.Join(node, f"host-{node}", f"task of {node}"))

    def come(self, node):
        """Have another task come in the place of one that is gone, or that never came."""
        join = say.Join(node, f"new-{node}", f"task {next(TASKS)}")
        assert self.state.refuses(join) is None
        self.say(node, join)

    def turn_away(self, join):
        answer = self.state.refuses(join)
        self.post(self.state.tick())
        return answer

    def ready(self, node, launch=0, hang_timeout_s=float("inf"), **said):
        policy = {name: said.pop(name) for name in POLICY & said.keys()}
        policy = LaunchPolicy(**{"hang_timeout_s": hang_timeout_s, **policy})
        own = {**FIELDS, **{name: said.pop(name) for name in FIELDS.keys() & said.keys()}}
        self.calls[node], policy = launch, None if node else policy
        self.say(node, say.Ready(launch, facts={**FACTS, **said}, policy=policy, **own))

    def prepare(self, node, launch=0):
        """Have the commands of before_run begin."""
        self.calls[node] = launch
        self.say(node, say.Report("before_run", launch))

    def all_ready(self, launch=0, **said):
        for node in range(self.num_nodes):
            self.ready(node, launch, **said)

    def about(self, node, launch=None, generation=None):
        launch = self.calls[node] if launch is None else launch
        goes = [go.generation for go in self.got(node, "Go") if go.launch == launch]
        return launch, goes[-1] if generation is None and goes else generation

    def failed(self, node, *causes, launch=None, generation=None, age_s=0.0, given_up=False):
        about = self.about(node, launch, generation)
        self.say(node, say.Failed(*about, failures(*causes, age_s=age_s), given_up))

    def ended(self, node, *causes, ok=None, launch=None, generation=None, age_s=0.0, **more):
        number, generation = self.about(node, launch, generation)
        ok = not causes if ok is None else ok
        self.say(node, say.Ended(number, ok, generation, failures(*causes, age_s=age_s), **more))

    def all_ended(self, *nodes, **more):
        for node in nodes or range(self.num_nodes):
            self.ended(node, **more)

    def stop(self, *nodes, **more):
        """Have the workers of nodes be gone that were stopped."""
        self.all_ended(*nodes, ok=False, **more)

    def fail(self, *causes):
        """Have a generation fail, and all its workers be gone."""
        for cause in causes:
            self.ended(cause.node, cause)
        for node in {*range(self.num_nodes)} - {cause.node for cause in causes}:
            self.ended(node, ok=False)

    def stored(self, *nodes, fails=()):
        for node in nodes:
            self.say(node, say.Stored(*self.about(node), failures(*fails)))
        return self

    def give_up(self, node, cause=None):
        """Do what a node does whose `run` is ended by an exception of its own."""
        self.failed(node, cause or of_node("call", node), given_up=True)
        self.ended(node, ok=False)

    def done(self, *nodes):
        for node in nodes or range(self.num_nodes):
            self.say(node, say.Leave("done"))
        return self

    def leave(self, node, cause=None, failed=False):
        self.say(node, say.Leave("failed" if cause is not None or failed else "left", cause))

    def killed(self, node):
        """End a task whose supervisor says so, and still ends the workers."""
        self.say(node, say.Leave("killed", text="its task was killed by SIGKILL"))

    def lost(self, node, why="its task was killed by SIGKILL"):
        return self.post(self.state.lost(node, why))

    def cut(self, node):
        self.lost(node, "its connection was closed")

    def got(self, node, kind):
        """Return a node's messages of a class, or of one with that name."""
        kind = getattr(say, kind) if isinstance(kind, str) else kind
        return [message for message in self.sent[node] if isinstance(message, kind)]

    def notes(self, node):
        return [note.text for note in self.got(node, "Note")]

    def farewells(self, node):
        return [farewell.what for farewell in self.got(node, "Farewell")]

    def restarts(self, node=0):
        """Return each *go* that says why workers start again."""
        return [go for go in self.got(node, "Go") if go.cause is not None]

    def groups(self, node=0):
        """Return the nodes of each generation that a node has heard of."""
        return [go.group.nodes for go in self.got(node, "Go")]

    def verdict(self, node, launch=None):
        (verdict,) = [each for each in self.got(node, "Verdict") if launch in (None, each.launch)]
        return verdict.error

    def same_verdict(self, *nodes, launch=None):
        """Return the one verdict that all nodes got."""
        first, *others = [self.verdict(node, launch) for node in nodes or range(self.num_nodes)]
        assert all(error is first for error in others)
        return first

    def abort(self, node):
        (abort,) = self.got(node, "Abort")
        return abort.error

    def is_undecided(self):
        return not any(self.got(node, "Verdict") for node in self.sent)

    def recorded(self, *kinds):
        return [event for event in self.state.view.events if event.kind in kinds]

    def lives(self, node):
        """Have a worker of a node show a sign of life."""
        self.say(node, say.Report("hangs", *self.about(node), {"age_s": 0.0}))


WORDS = {
    "prepare": lambda gang, *nodes: [gang.prepare(node) for node in nodes],
    "commands_fail": lambda gang, *nodes: [gang.failed(node, of_node("command", node, NO_DATA)) for node in nodes],
    "crash": lambda gang, *nodes: [gang.ended(node, crash(node)) for node in nodes],
    "told": lambda gang, node: gang.failed(node, preemption(node)),  # to end, while its workers run
    "quit": lambda gang, node: gang.give_up(node, preemption(node)),
    "raises": lambda gang, node: gang.leave(node, of_node("step", node)),
    "raises_verdict": lambda gang, node: gang.leave(node, failed=True),
    "all_stop_and_store": lambda gang: gang.all_ended(ok=False, stores=True),
    "all_store": lambda gang: gang.all_ended(stores=True),
    "store": lambda gang, node: gang.ended(node, stores=True),
    "store_badly": lambda gang, node: gang.stored(node, fails=[crash(node, NOT_STORED, "store")]),
    "differ": lambda gang, node: gang.ready(node, nproc=7),
    "pin": lambda gang, node: gang.ready(node, master_port=1),
    "silence": lambda gang: gang.play("lives 1" + ", +3" * 15),  # for 30 s, and no node answers
    "unreached": lambda gang, node: gang.say(node, say.Report("unreached", *gang.about(node), UNREACHED)),
    "frozen": lambda gang, seconds: gang.post(gang.state.was_stopped(seconds)),
}


def running(num_nodes=3, **given):
    """Return a gang whose first launch runs; the clock is at 1000."""
    gang = GangOf(num_nodes, **{name: given.pop(name) for name in OF_THE_GANG & given.keys()})
    gang.all_ready(**given)
    return gang
