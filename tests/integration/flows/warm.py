"""Runs the same launches cold and warm; what they are comes from the environment, as JSON.

``WARM_LAUNCHES``: a list of launches, each with its ``name``, the arguments of ``current.torch.run``, and what the step's
code does to its own process just before; ``WARM_VARIANTS``: what `warm` is, for each launch one after the other.
"""

import json
import os
import resource
import signal
from contextlib import contextmanager

from metaflow import FlowSpec, Parameter, TorchrunError, current, step, torchrun
from notes import note
from spares import await_spares

ATTRS = json.loads(os.environ.get("GANG_ATTRS", "{}"))
LAUNCHES = json.loads(os.environ["WARM_LAUNCHES"])
VARIANTS = json.loads(os.environ["WARM_VARIANTS"])


def see():
    """See all that a function can see, and train as one that nobody has made a process group for."""
    from observed import interpreter, kernel
    from observed.alone import train
    from observed.note import note

    note("seen", same={**interpreter.everything(), **kernel.everything()}, random=interpreter.of_randomness())

    train()


FUNCTIONS = {"function": see}


@contextmanager
def changed(umask=0o22, cwd=".", env=None, signals=False, files=None, affinity=None, nice=0):
    """Change what a child has from its parent, for one launch; nobody takes a process's niceness back."""
    before = os.getcwd(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    old_mask, old_signals = os.umask(umask), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2] * signals)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN if signals else signal.SIG_DFL)
    try:
        os.chdir(cwd)
        os.environ.update({name: value for name, value in (env or {}).items() if value is not None})
        for name in [name for name, value in (env or {}).items() if value is None]:
            os.environ.pop(name, None)
        os.sched_setaffinity(0, affinity or before[3])
        resource.setrlimit(resource.RLIMIT_NOFILE, (files or before[2][0], before[2][1]))
        os.setpriority(os.PRIO_PROCESS, 0, nice or os.getpriority(os.PRIO_PROCESS, 0))
        yield
    finally:
        os.chdir(before[0])
        os.environ.clear()
        os.environ.update(before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, before[2])
        os.sched_setaffinity(0, before[3])
        os.umask(old_mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_signals)
        signal.signal(signal.SIGUSR1, handler)


def make_ready(variant, workers, next_workers):
    """Wait until all spares wait, and tell a script that is to fail once how many the next ones are."""
    if variant != "cold":
        await_spares(1 + workers)
    count = 0 if variant == "cold" else 1 + next_workers
    with open(os.path.join(os.environ["GANG_OUT"], "spares"), "w") as file:
        file.write(str(count))


def launched(torch, number, run, change):
    """Return what came of one launch; the exit codes are those of its first generation."""
    options = {**run.pop("torchrun_args", {}), "log_dir": os.path.join(os.environ["GANG_OUT"], "logs")}
    try:
        with changed(**change):
            result = torch.run(**run, torchrun_args=options)
    except TorchrunError as error:
        result = error
    ends = [event for event in result.events if event["kind"] == "exited" and event["launch"] == number]
    codes = {event["rank"]: event["exit_code"] for event in ends if event["generation"] == 0}
    return {"error": str(getattr(result, "message", "")), "exit_codes": codes}


class WarmFlow(FlowSpec):
    """Keeps what came of each launch, in the order of their numbers."""

    nodes = Parameter("nodes", default=1, type=int)

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun(**ATTRS)
    @step
    def train(self):
        ended, spare_workers = [], ATTRS["nproc_per_node"]  # as many as the last launch had that could have any
        if not os.path.islink("a link.py"):
            os.symlink("observed/script.py", "a link.py")
        for launch in LAUNCHES:
            for variant in launch.get("variants", VARIANTS):
                entrypoint = FUNCTIONS.get(launch["name"]) or launch["run"]["entrypoint"]
                run = {
                    **launch["run"],
                    "entrypoint": entrypoint,
                    "warm": False if variant == "cold" else variant,
                }
                before = spare_workers
                if variant == "workers" and "no_python" not in run.get("torchrun_args", {}):
                    spare_workers = run.get("nproc_per_node", ATTRS["nproc_per_node"])
                make_ready(variant, before, spare_workers)
                outcome = launched(current.torch, len(ended), run, launch.get("change", {}))
                ended.append({"name": launch["name"], "variant": variant, **outcome})
        note(f"launches-{current.parallel.node_index}", ended)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    WarmFlow()
