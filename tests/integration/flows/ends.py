"""A node fails after its step's code; ``GANG_HOOK`` says how, and on which node, as in ``artifact:1``."""

import os
import signal
import threading

from around import Around
from metaflow import current, step, torchrun

HOOK, _, NODE = os.environ.get("GANG_HOOK", "").partition(":")


class Deadly:
    """Ends the task while it is pickled, as a lack of memory does."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


class EndsFlow(Around):
    @torchrun
    @step
    def train(self):
        current.torch.run("worker.py", nproc_per_node=1)
        if current.parallel.node_index == int(NODE):
            self.bad = {"artifact": threading.Lock(), "killed": Deadly()}.get(HOOK)
        self.next(self.join)


if __name__ == "__main__":
    EndsFlow()
