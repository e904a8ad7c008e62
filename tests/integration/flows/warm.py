"""Runs the same launches cold and warm; what they are comes from ``WARM_LAUNCHES``, as JSON.

Each has its ``name``, the arguments of ``current.torch.run``, and the `warm` of each time that it is run.
"""

import json
import os
import signal

from around import Around
from metaflow import current, step, torchrun
from notes import note
from spares import await_spares

LAUNCHES = json.loads(os.environ["WARM_LAUNCHES"])
NPROC = 2
ODD = {"A_TEXT": 'it\'s "quoted" \udcff\nand löng', "EMPTY": ""}


def see():
    """See all that a function can see."""
    from observed import seen

    seen.note(same=seen.everything(), random=seen.drawn())


def change_this_process():
    """Change what a child has from its parent."""
    os.symlink("observed/script.py", "a link.py")
    os.chdir("sub folder")
    os.environ.update(ODD)
    del os.environ["FROM_BEFORE"]
    os.umask(0o27)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class WarmFlow(Around):
    @step
    def start(self):
        self.next(self.train, num_parallel=1)

    """Keeps the name and variant of each launch, in the order of their numbers."""

    @torchrun(nproc_per_node=NPROC, warm="workers", preload=["numpy.random"])
    @step
    def train(self):
        change_this_process()
        ended = []
        for launch in LAUNCHES:
            for warm in launch["variants"]:
                if warm:
                    await_spares(1 + NPROC)
                note("spares", 1 + NPROC if warm else 0)  # for these a script waits that is to fail once
                run = {**launch["run"], "warm": warm}
                run["entrypoint"] = see if launch["name"] == "function" else launch["run"]["entrypoint"]
                current.torch.run(**run)
                ended.append([launch["name"], warm])
        note("launches", ended)
        self.next(self.join)


if __name__ == "__main__":
    WarmFlow()
