"""The flow that most tests run: what it does comes from the environment, as JSON.

``GANG_ATTRS``: attributes of ``@torchrun``. ``GANG_RUNS``: a list of arguments for ``current.torch.run``.
``GANG_HOOK``: what the step's own code does besides, see `hook`; with ``go-on`` it catches what
the launches raise, with ``raise-last`` all but what the last one raises. ``GANG_OUT``: a folder for files.
``GANG_CARD``: the step has the gang's card; with ``own`` a card of its own with parts of it, too.
"""

import atexit
import json
import math
import os
import signal
import sys
import threading
import time

from metaflow import FlowSpec, Parameter, TorchrunError, card, current, retry, step, timeout, torchrun
from metaflow.cards import Markdown
from notes import note

ATTRS = json.loads(os.environ.get("GANG_ATTRS", "{}"))
RUNS = json.loads(os.environ.get("GANG_RUNS", '[{"entrypoint": "worker.py"}]'))
HOOK = os.environ.get("GANG_HOOK", "")

if HOOK == "never-arrives" and os.environ.get("MF_PARALLEL_NODE_INDEX") == "1":
    time.sleep(120)


if HOOK == "dies-early" and os.environ.get("MF_PARALLEL_NODE_INDEX") == "1":
    note("failed", {"at": time.time()})
    sys.exit(7)


class Deadly:
    """Ends the task while it is pickled, as a lack of memory does."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def hook(moment: str) -> object:
    """Do what the test asks of the step's own code, as in ``before:1:raise``; return an artifact that can't be stored."""
    wanted = HOOK.split(":")
    if wanted[:2] != [moment, str(current.parallel.node_index)]:
        return None
    if wanted[2] == "raise":
        note("failed", {"at": time.time()})
        raise ValueError(f"step code failed {moment} run")
    if wanted[2] == "sleep":
        time.sleep(60)
    if wanted[2] == "exit":  # after the node has left the gang
        atexit.register(os._exit, 3)
    if wanted[2] == "kill" and current.retry_count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"artifact": threading.Lock(), "killed": Deadly()}.get(wanted[2])


def note_error(name: str, error: TorchrunError) -> None:
    """Leave what the test has to know of an error."""
    events = [event["kind"] for event in error.events]
    said = {"class": type(error).__name__, "message": str(error), "cause": error.cause, "events": events}
    note(name, {**said, "at": time.time()})


def same(decorator):
    return decorator


class GangFlow(FlowSpec):
    """Runs a gang and keeps what came of it."""

    nodes = Parameter("nodes", default=2, type=int)

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @(retry(times=2, minutes_between_retries=0) if "retry" in HOOK else same)
    @(timeout(seconds=math.ceil(6 * float(os.environ.get("TESTS_SLOWNESS", "1")))) if "timeout" in HOOK else same)
    @(card(type="torchrun") if "GANG_CARD" in os.environ else same)
    @(card(id="own") if os.environ.get("GANG_CARD") == "own" else same)
    @torchrun(**ATTRS)
    @step
    def train(self):
        torch, node = current.torch, current.parallel.node_index
        facts = ("num_nodes", "node_index", "nproc_per_node", "world_size", "main_addr", "is_control")
        self.facts = {name: getattr(torch, name) for name in facts}
        self.node, self.attempt = node, current.retry_count
        note(f"task-{node}", {"pid": os.getpid(), "facts": self.facts, "torch": "torch" in sys.modules})
        hook("before")
        if os.environ.get("GANG_CARD") == "own":
            current.card["own"].extend([Markdown("# Mine"), torch.card("outcome", "ranks"), torch.card("timeline")])
        self.results = []
        for number, kwargs in enumerate(RUNS):
            try:
                self.results.append(torch.run(**kwargs))
            except TorchrunError as error:
                note_error(f"error-{node}-{current.retry_count}.{number}", error)
                if HOOK != "go-on" and (HOOK != "raise-last" or kwargs is RUNS[-1]):
                    raise
        self.bad = hook("after")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.tasks = [
            {"node": i.node, "attempt": i.attempt, "facts": i.facts, "results": [vars(r) for r in i.results]}
            for i in inputs
        ]
        self.kinds = [type(r).__name__ for i in inputs for r in i.results]
        self.next(self.end)

    @step
    def end(self):
        note("end", {"tasks": self.tasks, "kinds": self.kinds})


if __name__ == "__main__":
    GangFlow()
