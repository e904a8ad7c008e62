"""The flow that most remote tests run: `plan.py` beside it, which the test writes, says what it does.

Only the gang's step runs remotely; the others are local and quick.
"""

import json
import os
import threading
import time
from pathlib import Path

import plan
from backend import where
from metaflow import FlowSpec, card, current, retry, step, timeout, torchrun

# A pod of a gang that is not the control node, before Metaflow knows.
if plan.LATE_S and os.environ.get("MF_WORKER_REPLICA_INDEX") is not None:
    time.sleep(plan.LATE_S)


def same(decorator):
    return decorator


def hook(moment: str) -> None:
    """Do what the test asks of the step's own code, as in ``after:1:raise``."""
    wanted = plan.HOOK.split(":")
    if wanted[0] != moment or wanted[1] not in ("*", str(current.parallel.node_index)):
        return
    if wanted[2] == "await-spares":
        from spares import await_spares

        await_spares(int(wanted[3]))
    if wanted[2] == "raise":
        raise ValueError(f"step code failed {moment} run")
    if wanted[2] == "sleep":
        time.sleep(float(wanted[3]))
    if wanted[2] == "oom":  # of the task itself
        hoard = []
        while True:
            hoard.append(bytearray(b"x" * (16 * 2**20)))
    if wanted[2] == "spot":  # what Metaflow's monitor does when the cloud says so
        threading.Timer(6, Path(current.spot_termination_notice).write_text, ["2026-11-21T10:00:00Z"]).start()


class Unstorable:
    """Can't be pickled, so that storing the step's results fails."""

    def __reduce__(self):
        raise TypeError("this artifact can't be stored")


class SlowToStore:
    """Takes long to be pickled."""

    def __reduce__(self):
        print("is being pickled", flush=True)
        time.sleep(300)
        return (SlowToStore, ())


class RemoteGang(FlowSpec):
    """Runs a gang and prints what came of it."""

    @step
    def start(self):
        self.next(self.train, num_parallel=plan.NODES)

    @(retry(times=1, minutes_between_retries=0) if plan.RETRY else same)
    @where
    @(card(type="torchrun") if plan.CARD else same)
    @(timeout(seconds=plan.TIMEOUT_S) if plan.TIMEOUT_S else same)
    @torchrun(**plan.TORCHRUN)
    @step
    def train(self):
        self.node, self.attempt = current.parallel.node_index, current.retry_count
        hook("before")
        env = {"ATTEMPT": self.attempt, "WORKER_DO": plan.DO}
        self.results = [current.torch.run(entrypoint="worker.py", env=env, **plan.RUN)]
        hook("after")
        if f"unstorable:{self.node}" == plan.HOOK:
            self.bad = Unstorable()
        if f"slow-to-store:{self.node}" == plan.HOOK:
            self.bad = SlowToStore()
        self.next(self.join)

    @step
    def join(self, inputs):
        kept = [{"node": i.node, "attempt": i.attempt, "results": i.results} for i in inputs]
        print("GATHERED " + json.dumps(kept, default=vars))
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    RemoteGang()
