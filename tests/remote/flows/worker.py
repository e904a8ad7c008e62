"""A worker without torch, to be quick: does as ``WORKER_DO`` says, a list of ``RANK:ACTION``; ``*`` is every rank."""

import os
import signal
import sys
import time

RANK = os.environ["RANK"]


def eat_memory() -> None:
    """Use more and more memory until the kernel says no; touched, so that it counts."""
    hoard = []
    while True:
        hoard.append(bytearray(b"x" * (16 * 2**20)))
        time.sleep(0.02)


def act(action: str) -> None:
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
    if action == "talk":
        for number in range(6000):
            print(f"word {number}", flush=True)
            time.sleep(0.05)
    if action.endswith("-once") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        act(action.removesuffix("-once"))
    if action == "nap":
        time.sleep(2)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.startswith("await-spares-") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from spares import await_spares

        await_spares(int(action.removeprefix("await-spares-")))
    if action == "say-torch":
        print("torch was imported before" if "torch" in sys.modules else "torch was not imported before", flush=True)
    if action.endswith("-first") and os.environ["ATTEMPT"] == "0":
        act(action.removesuffix("-first"))


print(f"rank {RANK} of {os.environ['WORLD_SIZE']} runs", flush=True)
for wanted in filter(None, os.environ.get("WORKER_DO", "").split(",")):
    rank, what = wanted.split(":")
    if rank in (RANK, "*"):
        act(what)
