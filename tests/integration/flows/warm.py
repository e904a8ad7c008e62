"""Runs the same launches cold and warm; what they are comes from ``WARM_LAUNCHES``, as JSON.

Each has its ``name``, the arguments of ``current.torch.run``, and the `warm` of each time that it is run.
"""

import json
import os
import signal
import sys

from around import Around
from metaflow import TorchrunError, current, step, torchrun
from notes import note
from spares import await_spares

LAUNCHES = json.loads(os.environ["WARM_LAUNCHES"])
NPROC = 2
ODD = {"A_TEXT": 'it\'s "quoted" \udcff\nand löng', "EMPTY": ""}


def see():
    """See all that a function can see, and train as one that nobody has made a process group for."""
    from observed import seen
    from observed.alone import train

    seen.note(same=seen.everything(), random=seen.drawn())
    train()


def change_this_process():
    """Change what a child has from its parent."""
    os.symlink("observed/script.py", "a link.py")
    os.chdir("sub folder")
    os.environ.update(ODD)
    del os.environ["FROM_BEFORE"]
    os.umask(0o27)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def launched(run, number):
    """Return what came of one launch; the exit codes are those of its first generation."""
    for stream in (sys.stdout, sys.stderr):
        print("-- launch", number, file=stream, flush=True)
    try:
        result = current.torch.run(**run)
    except TorchrunError as error:
        result = error
    ends = [event for event in result.events if event["kind"] == "exited" and event["launch"] == number]
    return {rank: event["exit_code"] for event in ends if event["generation"] == 0 for rank in event["ranks"]}


class WarmFlow(Around):
    size = 1

    """Keeps what came of each launch, in the order of their numbers."""

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
                codes = launched(run, len(ended))
                ended.append({"name": launch["name"], "variant": warm, "exit_codes": codes})
        note("launches", ended)
        self.next(self.join)


if __name__ == "__main__":
    WarmFlow()
