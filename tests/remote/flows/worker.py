"""A worker without torch, to be quick: does as ``WORKER_DO`` says, a list of ``RANK:ACTION``; ``*`` is every rank."""

import os
import signal
import time

RANK = os.environ["RANK"]


def eat_memory() -> None:
    """Use more and more memory until the kernel says no; touched, so that it counts."""
    hoard = []
    while True:
        hoard.append(bytearray(b"x" * (16 * 2**20)))
        time.sleep(0.02)


def act(action: str) -> None:
    if action == "raise":
        raise ValueError(f"bad loss on rank {RANK}")
    if action == "wipe":  # every process of this container but its first, this one last
        os.kill(-1, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "oom":
        eat_memory()
    if action == "sleep":
        time.sleep(300)
    if action == "save":  # takes its time, as a checkpoint does, and ends well
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), os._exit(0)))
        time.sleep(300)
    if action == "nap":
        time.sleep(2)
    if action == "kill-first" and os.environ["ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


print(f"rank {RANK} of {os.environ['WORLD_SIZE']} runs", flush=True)
for wanted in filter(None, os.environ.get("WORKER_DO", "").split(",")):
    rank, what = wanted.split(":")
    if rank in (RANK, "*"):
        act(what)
