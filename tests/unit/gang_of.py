"""A gang whose nodes say what a test has them say, by a clock that the test holds."""

import gc
import itertools
from dataclasses import fields, replace
from types import FunctionType, ModuleType

from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Failing, Keeper, Keepers, Remarks

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Abort,
    Ended,
    Failed,
    Go,
    Join,
    Leave,
    Note,
    Ready,
    Stored,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, Rules

GRACE_S, STOP_S = 30.0, 45.0  # the workers' grace, and how long a node may take to stop them
FACTS = {"torch": "2.13.0", "cuda": "12.4", "nccl": "2.21.5", "python": "3.11", "devices": "none", "contents": "f00"}
FIELDS = {"nproc": 2, "digest": "abc", "master_port": None}
POLICY = {each.name for each in fields(LaunchPolicy)}
OF_THE_GANG = {each.name for each in fields(Rules)} | {"taken", "join", "keepers"}
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


class Silence(Keeper):
    """Has a launch fail where nothing is told for so long, as the feature that looks for hangs."""

    def begin(self, launch, policy, at_s):
        self.limit_s, self.at_s = policy.get("timeout_s"), at_s

    def handle(self, node, told, at_s):
        self.at_s = max(self.at_s, at_s - told.data["age_s"])

    def tick(self, at_s, where):
        is_silent = self.limit_s is not None and at_s - self.at_s > self.limit_s
        return Remarks(failing=Failing("hang", "no rank wrote") if is_silent else None)

    def find_out_s(self, kind):
        return 15.0 if kind == "hang" else 0.0

    def detail(self, kind):
        return "found out" if kind == "hang" else ""


class GangOf:
    """A gang, and what its nodes have been sent; its keywords are those of `Rules`, too."""

    def __init__(self, num_nodes=3, taken=(), join=True, keepers=None, **rules):
        self.now, self.num_nodes = 1000.0, num_nodes
        self.ports, self.taken = iter(range(40001, 60000)), set(taken)
        keepers = keepers or Keepers({"hangs": Silence()})
        self.state = Gang(num_nodes, self._pick, Rules(**{"grace_s": GRACE_S, **rules}), keepers, lambda: self.now)
        self.sent = {node: [] for node in range(num_nodes)}
        self.calls = dict.fromkeys(range(num_nodes), 0)  # the last launch that each has called
        self.join(*range(num_nodes) if join else ())

    def _pick(self, pinned):
        return next(self.ports) if pinned is None else None if pinned in self.taken else pinned

    def post(self, outgoing):
        for node, message in outgoing:
            self.sent[node].append(message)

    # --- what nodes do; without a number it is about the last launch, and its generation

    def say(self, node, message):
        self.post(self.state.handle(node, message))

    def join(self, *nodes):
        for node in nodes:
            self.say(node, Join(node, f"host-{node}", f"task of {node}", f"pod of {node}"))

    def come(self, node):
        """Have another task come in the place of one that is gone, or that never came."""
        join = Join(node, f"new-{node}", f"task {next(TASKS)}", "another pod")
        assert self.state.may_join(join)
        self.say(node, join)

    def turn_away(self, join):
        answer, outgoing = self.state.turn_away(join)
        self.post(outgoing)
        return answer

    def ready(self, node, launch=0, prepares=False, **said):
        policy = LaunchPolicy(**{name: said.pop(name) for name in POLICY & said.keys()})
        policy = replace(policy, features={"hangs": {"timeout_s": said.pop("hang_timeout_s", None)}})
        own = {**FIELDS, **{name: said.pop(name) for name in FIELDS.keys() & said.keys()}}
        self.calls[node] = launch
        self.say(
            node, Ready(launch, facts={**FACTS, **said}, policy=None if node else policy, prepares=prepares, **own)
        )

    def all_ready(self, launch=0, **said):
        for node in range(self.num_nodes):
            self.ready(node, launch, **said)

    def _about(self, node, launch, generation):
        launch = self.calls[node] if launch is None else launch
        goes = [go.generation for go in self.got(node, Go) if go.launch == launch]
        return launch, goes[-1] if generation is None and goes else generation

    def failed(self, node, *causes, launch=None, generation=None, age_s=0.0, given_up=False):
        about = self._about(node, launch, generation)
        self.say(node, Failed(*about, failures(*causes, age_s=age_s), given_up))

    def ended(self, node, *causes, ok=None, launch=None, generation=None, age_s=0.0, **more):
        number, generation = self._about(node, launch, generation)
        ok = not causes if ok is None else ok
        self.say(node, Ended(number, ok, generation, failures(*causes, age_s=age_s), **more))

    def all_ended(self, *nodes, **more):
        for node in nodes or range(self.num_nodes):
            self.ended(node, **more)

    def stop(self, *nodes, **more):
        """Have the workers of nodes be gone that were stopped."""
        self.all_ended(*nodes, ok=False, **more)

    def stored(self, node, *causes):
        self.say(node, Stored(*self._about(node, None, None), failures(*causes)))

    def give_up(self, node, cause):
        """Do what a node does whose `run` is ended by an exception of its own."""
        self.failed(node, cause, given_up=True)
        self.ended(node, ok=False)

    def done(self, *nodes):
        for node in nodes:
            self.say(node, Leave("done"))

    def leave(self, node, cause=None, failed=None):
        self.say(node, Leave("failed" if cause is not None or failed else "left", cause))

    def lost(self, node, why="its task was killed by SIGKILL", **more):
        self.post(self.state.lost(node, why, **more))

    def pass_time(self, seconds):
        self.now += seconds
        self.post(self.state.tick())

    # --- what nodes get

    def got(self, node, kind):
        return [message for message in self.sent[node] if isinstance(message, kind)]

    def notes(self, node):
        return [note.text for note in self.got(node, Note)]

    def groups(self, node=0):
        """Return the nodes of each generation that a node has heard of."""
        return [go.group.nodes for go in self.got(node, Go)]

    def verdict(self, node, launch=None):
        (verdict,) = [each for each in self.got(node, Verdict) if launch in (None, each.launch)]
        return verdict.error

    def same_verdict(self, *nodes, launch=None):
        """Return the one verdict that all nodes got."""
        first, *others = [self.verdict(node, launch) for node in nodes or range(self.num_nodes)]
        assert all(error is first for error in others)
        return first

    def abort(self, node):
        (abort,) = self.got(node, Abort)
        return abort.error

    def is_undecided(self):
        return not any(self.got(node, Verdict) for node in range(self.num_nodes))

    def recorded(self, *kinds):
        """Return the records of some kinds."""
        return [record for record in self.state.history.records if record.kind in kinds]


def running(num_nodes=3, **given):
    """Return a gang whose first launch runs; the clock is at 1000."""
    gang = GangOf(num_nodes, **{name: given.pop(name) for name in OF_THE_GANG & given.keys()})
    gang.all_ready(**given)
    return gang


def objects_of(root):
    """Return how many objects hang together with one, without modules, classes and functions."""
    seen, found = set(), [root]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
            seen.add(id(each))
            found += gc.get_referents(each)
    return len(seen)
