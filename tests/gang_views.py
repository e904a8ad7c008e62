"""Views of gangs: the real machine lives through a story, by a clock that the test holds."""

import json

from gang_of import GangOf

from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.progress import Metrics, Pace
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import GangView
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.show.page import Place
from metaflow_extensions.torchrun.plugins.torchrun.show.words import ranks_on

BEGAN = 1_795_314_000.0  # 2026-11-22 02:20:00 UTC
MARKUP = (
    "</pre></div><script>window.hit = 1</script>\n\n# a title\n\n[x](javascript:window.hit=1) "
    "<img src=x onerror=window.hit=1>\r\n\x1b[31m\0"
)


def crash(rank=2, text="ValueError: *nan* 🙂", node=1, host="gpu-1", **more):
    """Return the failure of a worker."""
    detail, stdout = 'Traceback\n  File "train.py", line 3\n    boom', "step 41: loss 2.3\nstep 42: loss nan"
    more = {"kind": "exception", "exit_code": 1, "detail": detail, "stdout": stdout, **more}
    return Cause(node=node, host=host, rank=rank, local_rank=0, exception=text, **more)


def place(attempt=0, last=0, **more):
    """Return what Metaflow has of the gang."""
    more = {"tasks": {0: "4", 1: "4_node_1"}, **more}
    return Place("Flow", "12", "train", "4", attempt=attempt, last_attempt=last, **more)


class Story(GangOf):
    """A gang whose nodes do what the test says; without numbers, all of them do. Each method returns the story."""

    def __init__(self, num_nodes=2, nproc=2, host="gpu-{}", **rules):
        super().__init__(num_nodes, join=False, now=0.0, **rules)
        self.nproc, self.host = nproc, host
        self.state.view.began, self.state.view.command = BEGAN, "torchrun -- train.py --lr 1"

    def at(self, seconds):
        """Let time go by until a moment; the gang looks at its clock each second."""
        while self.now < seconds:
            self.pass_time(min(1.0, seconds - self.now))
        return self

    def all(self, nodes, do):
        for node in nodes or range(self.num_nodes):
            do(node)
        return self

    @property
    def running_nodes(self):
        """Those that have ranks."""
        return self.state.launch.group.nodes

    def report(self, kind, *nodes, **data):
        """Let nodes report something; without numbers, those whose workers run."""
        about = lambda node: messages.Report(kind, *self.about(node), data)  # noqa: E731
        return self.all(nodes or self.running_nodes, lambda node: self.say(node, about(node)))

    def joined(self, *nodes, task="the first"):
        return self.all(nodes, lambda node: self.say(node, messages.Join(node, self.host.format(node), task)))

    def ready(self, *nodes, launch=0, policy=None, **facts):
        said = {"nproc": self.nproc, "hang_timeout_s": None, **(policy or {}), **facts}
        return self.all(nodes, lambda node: GangOf.ready(self, node, launch, **said))

    def prepare(self, *nodes):
        return self.all(nodes, lambda node: GangOf.prepare(self, node))

    def launched(self, **more):
        """Let all join and call `run`, and the workers start; it takes 2 s."""
        return self.at(0.5).joined(0).at(1.5).joined(*range(1, self.num_nodes)).at(2.0).ready(**more)

    def running(self, **more):
        return self.launched(**more).at(3.0).report("started").at(4.0).report("wrote")

    def failed(self, *causes, given_up=False):
        """Let the first node say what has failed: all are told to stop."""
        GangOf.failed(self, causes[0].node, *causes, given_up=given_up)
        return self

    def ended(self, *nodes, codes=(0, 0), ok=None, stores=False):
        """Let the workers of nodes be gone; each has the same `codes`."""
        ok = not any(codes) if ok is None else ok

        def ended(node):
            ranks = ranks_on(self.state.view, node)
            known = {rank: code for rank, code in zip(ranks, codes, strict=False) if code is not None}
            GangOf.ended(self, node, ok=ok, exit_codes=known, stores=stores)

        return self.all(nodes or self.running_nodes, ended)

    def crashed(self, cause=None):
        """Let a rank fail, at this moment, and all be gone a second later."""
        cause = cause or crash()
        self.failed(cause).at(self.now + 1.0)
        others = [node for node in self.running_nodes if node != cause.node]
        return self.ended(cause.node, codes=(cause.exit_code, -15)).ended(*others, codes=(-15, -9))

    def broken(self, text):
        return self.post(self.state.give_up(GangError(text)))

    def left(self, *nodes, how="left", cause=None):
        """Let nodes leave, the control node last."""
        nodes = nodes or range(self.num_nodes - 1, -1, -1)
        return self.all(nodes, lambda node: self.say(node, messages.Leave(how, cause)))

    def progress(self, paces, points=(), total=None, node=0, launch=None):
        """Let a node tell the steps a second of its ranks, and points of rank 0 as (step, values)."""
        by_key = {}
        for step, values in points:
            for key, value in values.items():
                by_key.setdefault(key, []).append((step, value))
        step = points[-1][0] if points else None
        metrics = Metrics({rank: Pace(speed) for rank, speed in paces.items()}, by_key, step, total)
        return self.say(node, messages.Report("progress", *self.about(node, launch), to_plain(metrics)))

    @property
    def view(self):
        """What is known now, as it comes back from the datastore."""
        stored = json.dumps(to_plain(self.state.view), allow_nan=False)
        return GangView.read(json.loads(stored)).at(self.now)


def hostile():
    """A gang that has restarted and failed, with hostile texts wherever users and machines choose them."""
    story = (
        Story(host=MARKUP).running(torch=MARKUP, policy={"max_restarts": 1}).progress({0: 1.0}, [(1, {MARKUP: 1.0})])
    )
    for each in (MARKUP, f"again {MARKUP}"):
        story.crashed(crash(text=each, detail=each, stdout=each, host=each))
    story.state.view.command = MARKUP
    return story
