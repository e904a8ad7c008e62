"""Gangs as `Snapshot` has them, for tests of what is made of it."""

from dataclasses import replace

from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.history import Record, Report
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from metaflow_extensions.torchrun.plugins.torchrun.show.page import Place

BEGAN = 1_795_314_000.0
MARKUP = (
    "</pre></div><script>window.hit = 1</script>\n\n# a title\n\n[x](javascript:window.hit=1) "
    "<img src=x onerror=window.hit=1>\r\n\x1b[31m\0"
)
CAUSE = Cause(
    "exception",
    1,
    "gpu-2",
    rank=2,
    exit_code=1,
    exception="ValueError: *nan* 🙂",
    detail="Traceback\n  boom",
    stdout="step 41: loss 2.3\nstep 42: loss nan",
)
WHAT = "Rank 2 on node 1 (host gpu-2) failed with ValueError: *nan* 🙂"
HERE = {"launch": 0, "generation": 0}


def records(*told):
    """Return records of what is told as (second, kind, fields)."""
    return [Record(kind, at_s, BEGAN + at_s, **fields) for at_s, kind, fields in told]


def snapshot(told, *reports, num_nodes=2, nproc=2, **more):
    """Return what is known of a gang of which this has happened."""
    return Snapshot(num_nodes, nproc, events=tuple(records(*told)), reports=tuple(reports), **more)


def launch(begin, codes, generation=0):
    """Return a launch from *go* to the ends of two nodes with two ranks each."""
    of = {"launch": 0, "generation": generation}
    ends = {0: "exited with code 0", 1: "exited with code 1", -15: "was killed by SIGTERM: it was told to stop"}
    exits = [
        (begin + 3 + rank, "exited", {**of, "node": rank // 2, "rank": rank, "exit_code": code, "text": ends[code]})
        for rank, code in enumerate(codes)
    ]
    gone = [(begin + 6.5, "stopped", {**of, "node": node}) for node in (0, 1)]
    return [
        (begin, "go", {**of, "text": "2 nodes, 2 processes on each"}),
        (begin + 1, "output", {**of, "node": 1}),
        (begin + 2, "output", {**of, "node": 0}),
        *([(begin + 2.5, "stopping", {**of, "text": WHAT})] if any(codes) else []),
        *exits,
        *gone,
    ]


JOINED = [
    (0.0, "joined", {"node": 0, "text": "gpu-1"}),
    (1.5, "joined", {"node": 1, "text": "gpu-2"}),
    (1.5, "ready", {**HERE, "node": 0}),
    (2.0, "ready", {**HERE, "node": 1}),
]
CODES = (-15, -15, 1, -15)
OF_2 = {**HERE, "node": 1, "rank": 2, "exit_code": 1, "text": WHAT}
ENDS = [(20.0, "left", {"node": 1}), (20.5, "left", {"node": 0})]
LEFT = [*((19.0, "finished", {"node": node}) for node in (0, 1)), *ENDS]
LEFT_FAILED = [(at_s, kind, {**fields, "text": "its step has failed"}) for at_s, kind, fields in ENDS]
SUCCESS = [*JOINED, *launch(2, (0, 0, 0, 0)), (9.0, "done", HERE), *LEFT]
NOT_LEFT = [*JOINED, *launch(2, CODES), (9.0, "cause", OF_2), (9.0, "failed", {**HERE, "text": f"{WHAT}."})]
FAILURE = [*NOT_LEFT, *LEFT_FAILED]
RESTARTED = [
    *JOINED,
    *launch(2, CODES),
    (9.0, "cause", OF_2),
    (9.0, "restart", {**HERE, "text": "restart 1 of 2 in 1 s"}),
    *launch(10, (0, 0, 0, 0), generation=1),
    (18.0, "done", {"launch": 0, "generation": 1}),
    *LEFT,
]
RUNNING = [*JOINED, *launch(2, (0, 0, 0, 0))[:-6]]


def report(error="LaunchFailed", at_s=9.0, text=None):
    text = f"{CAUSE.describe()}\nLaunch 0 was stopped on all nodes." if text is None else text
    return Report(at_s, 0, 0, error, text, CAUSE.as_dict())


def place(attempt=0, last=0, is_done=False, **more):
    """Return what Metaflow has of the gang."""
    tasks = {0: "4", 1: "4_node_1"}
    return Place("Flow", "12", "train", "4", tasks, attempt, last, is_done, **more)


def a_gang(num_nodes=2, nproc=2, host="host", now_s=None, **features):
    """Return a gang whose workers run."""
    nodes = range(num_nodes)
    told = [(0.5, "joined", {"node": node, "text": f"{host}-{node}"}) for node in nodes]
    told += [(1.0, "ready", {"node": node, "launch": 0}) for node in nodes]
    told += [(1.5, "go", HERE), *((2.0, "output", {"node": node, **HERE}) for node in nodes)]
    return snapshot(told, num_nodes=num_nodes, nproc=nproc, features=features, now_s=now_s)


def failed(gang, rank, text, **cause):
    """Let a rank of a gang that runs fail."""
    node = rank // gang.nproc_per_node
    facts = {"node": node, "rank": rank, "exit_code": 1, **HERE}
    told = [
        (5.0, "exited", facts),
        (5.0, "stopped", {"node": node, **HERE}),
        (5.0, "cause", {"text": text, **facts}),
        (5.0, "failed", {"text": text, **HERE}),
    ]
    first = Cause("exception", node, "h", rank, 0, 1, text, text)
    cause = {**first.as_dict(), **cause}
    reports = (*gang.reports, Report(5.0, 0, 0, "LaunchFailed", text, cause))
    return replace(gang, events=(*gang.events, *records(*told)), reports=reports, cause=cause, error=text)
