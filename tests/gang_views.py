"""Views of gangs: the real machine lives through a story, by a clock that the test holds."""

import json

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, Rules
from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Metrics, Pace
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import GangView
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.page import Place

BEGAN = 1_795_314_000.0  # 2026-11-22 02:20:00 UTC
MARKUP = (
    "</pre></div><script>window.hit = 1</script>\n\n# a title\n\n[x](javascript:window.hit=1) "
    "<img src=x onerror=window.hit=1>\r\n\x1b[31m\0"
)
FACTS = {"torch": "2.13.0", "python": "3.11", "devices": "none", "contents": "f00"}


def crash(rank=2, text="ValueError: *nan* 🙂", node=1, host="gpu-1", **more):
    """Return the failure of a worker."""
    detail, stdout = 'Traceback\n  File "train.py", line 3\n    boom', "step 41: loss 2.3\nstep 42: loss nan"
    more = {"kind": "exception", "exit_code": 1, "detail": detail, "stdout": stdout, **more}
    return Cause(node=node, host=host, rank=rank, local_rank=0, exception=text, **more)


def place(attempt=0, last=0, **more):
    """Return what Metaflow has of the gang."""
    more = {"tasks": {0: "4", 1: "4_node_1"}, **more}
    return Place("Flow", "12", "train", "4", attempt=attempt, last_attempt=last, **more)


class Story:
    """A gang whose nodes do what the test says; without numbers, all of them do. Each method returns the story."""

    def __init__(self, num_nodes=2, nproc=2, host="gpu-{}", **rules):
        self.num_nodes, self.nproc, self.host, self.now = num_nodes, nproc, host, 0.0
        self.gang = Gang(num_nodes, lambda pinned: 29500, Rules(**rules), lambda: self.now)
        self.gang.view.began, self.gang.view.command = BEGAN, "torchrun -- train.py --lr 1"
        self.number, self.sent = 0, []  # of the last launch that was called; pairs of a node and a message for it

    def at(self, seconds):
        """Let time go by until a moment; the gang looks at its clock each second."""
        while self.now < seconds:
            self.now = min(seconds, self.now + 1.0)
            self.sent += self.gang.tick()
        return self

    def say(self, node, message):
        self.sent += self.gang.handle(node, message)
        return self

    def _all(self, nodes, message):
        for node in nodes or range(self.num_nodes):
            self.say(node, message(node))
        return self

    @property
    def _about(self):
        launch = self.gang.launch
        return {"launch": max(launch.number, self.number), "generation": max(0, launch.generation)}

    def report(self, kind, *nodes, **data):
        """Let nodes report something; without numbers, those whose workers run."""
        return self._all(
            nodes or self.gang.launch.group.nodes, lambda _: messages.Report(kind, **self._about, data=data)
        )

    def joined(self, *nodes, task="the first"):
        return self._all(nodes, lambda node: messages.Join(node, self.host.format(node), task, task))

    def ready(self, *nodes, launch=0, policy=None, **facts):
        self.number, policy, facts = launch, LaunchPolicy(**policy or {}), {**FACTS, **facts}
        about = {"launch": launch, "nproc": self.nproc, "facts": facts}
        return self._all(nodes, lambda node: messages.Ready(policy=None if node else policy, **about))

    def prepare(self, *nodes):
        return self._all(nodes, lambda node: messages.Report("before_run", 0))

    def launched(self, **more):
        """Let all join and call `run`, and the workers start; it takes 2 s."""
        return self.at(0.5).joined(0).at(1.5).joined(*range(1, self.num_nodes)).at(2.0).ready(**more)

    def running(self, **more):
        return self.launched(**more).at(3.0).report("started").at(4.0).report("wrote")

    def failed(self, *causes, given_up=False):
        """Let the first node say what has failed: all are told to stop."""
        failures = tuple(map(Failure, causes))
        return self.say(causes[0].node, messages.Failed(**self._about, failures=failures, given_up=given_up))

    def ended(self, *nodes, codes=(0, 0), ok=None, stores=False):
        """Let the workers of nodes be gone; each has the same `codes`."""

        def ended(node):
            ranks = self.gang.view.ranks_of(node)
            known = {rank: code for rank, code in zip(ranks, codes, strict=False) if code is not None}
            return messages.Ended(
                ok=not any(codes) if ok is None else ok, exit_codes=known, stores=stores, **self._about
            )

        return self._all(nodes or self.gang.launch.group.nodes, ended)

    def crashed(self, cause=None):
        """Let a rank fail, at this moment, and all be gone a second later."""
        cause = cause or crash()
        self.failed(cause).at(self.now + 1.0)
        others = [node for node in self.gang.launch.group.nodes if node != cause.node]
        return self.ended(cause.node, codes=(cause.exit_code, -15)).ended(*others, codes=(-15, -9))

    def stored(self, *nodes):
        return self._all(nodes, lambda _: messages.Stored(**self._about))

    def lost(self, node, why="its task was killed by SIGKILL"):
        self.sent += self.gang.lost(node, why)
        return self

    def broken(self, text):
        self.sent += self.gang.give_up(GangError(text))
        return self

    def done(self, *nodes):
        return self._all(nodes, lambda node: messages.Leave("done"))

    def left(self, *nodes, how="left", cause=None):
        """Let nodes leave, the control node last."""
        return self._all(nodes or range(self.num_nodes - 1, -1, -1), lambda node: messages.Leave(how, cause))

    def progress(self, paces, points=(), total=None, node=0, launch=None):
        """Let a node tell the steps a second of its ranks, and points of rank 0 as (step, values)."""
        by_key = {}
        for step, values in points:
            for key, value in values.items():
                by_key.setdefault(key, []).append((step, value))
        step = points[-1][0] if points else None
        metrics = Metrics({rank: Pace(speed) for rank, speed in paces.items()}, by_key, step, total)
        about = self._about if launch is None else {"launch": launch}
        return self.say(node, messages.Report("progress", **about, data=to_plain(metrics)))

    @property
    def view(self):
        """What is known now, as it comes back from the datastore."""
        stored = json.dumps(self.gang.view.stored(), allow_nan=False)
        return GangView.read(json.loads(stored)).at(self.now)


def hostile():
    """A gang that has restarted and failed, with hostile texts wherever users and machines choose them."""
    story = (
        Story(host=MARKUP).running(torch=MARKUP, policy={"max_restarts": 1}).progress({0: 1.0}, [(1, {MARKUP: 1.0})])
    )
    for each in (MARKUP, f"again {MARKUP}"):
        story.crashed(crash(text=each, detail=each, stdout=each, host=each))
    story.gang.view.command = MARKUP
    return story
