"""A worker without torch, to be quick: notes what it sees, then does as it is told.

``WORKER_DO`` is a list of ``RANK:ACTION`` with commas between; ``*`` is every rank.
"""

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

from notes import note

RANK = os.environ["RANK"]
LAUNCH = "-".join(os.environ.get("TORCHELASTIC_RUN_ID", "").split("-")[:2])  # without the gang's name
OUT = os.environ.get("GANG_OUT", "")


def child() -> None:
    """Leave a grandchild that is in a session of its own and ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def save_when_told() -> None:
    """Wait for the signal, take a second to save with all others, and end well."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    signals, loader = [], subprocess.Popen(["sleep", "100"])
    signal.signal(getattr(signal, os.environ.get("SAVE_ON", "SIGTERM")), lambda *_: signals.append(1))
    note(f"saves-{RANK}", {})
    while not signals:
        time.sleep(0.05)
    dist.barrier(group=dist.new_group(range(4)))  # asks torch's store, which an agent serves
    end = time.monotonic() + 1
    while time.monotonic() < end:
        time.sleep(0.05)
    note(f"saved-{RANK}", {"signals": len(signals), "loader": loader.poll()})
    sys.exit(0)


def first_time(name: str) -> bool:
    try:
        os.close(os.open(os.path.join(OUT, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def grumble() -> None:
    """Log what was handled, lose a thread, and fail at SIGTERM: nothing that could be the cause."""
    try:
        os.stat("/no/such/file")
    except OSError:
        logging.exception("retried")
    thread = threading.Thread(target=lambda: {}["of a thread"])
    thread.start()
    thread.join()

    def interrupted(*_: object) -> None:
        raise RuntimeError("interrupted")

    signal.signal(signal.SIGTERM, interrupted)


def tell_progress() -> None:
    """Tell twenty steps of forty, as docs/metrics.md says."""
    with open(os.environ.get("TORCHRUN_METRICS", os.devnull), "a") as metrics:
        for step in range(1, 21):
            told = {"step": step, "total": 40, "loss": 2 / step, "rank": int(RANK), "best": sys.float_info.max}
            print(json.dumps({**told, "tiny 🙂": 5e-324}), file=metrics)


def hold_rank() -> None:
    """Keep a lock for as long as this process lives, and tell if another one of this rank has it."""
    lock = os.open(os.path.join(OUT, f"held-{RANK}"), os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"twice-{LAUNCH}-{RANK}", os.getpid())


def act(action: str) -> None:
    if action == "hold":
        hold_rank()
    if action == "raise":
        raise ValueError("bad löss\nsecond line")
    if action == "grumble":
        grumble()
    if action == "exit3":
        print("about to leave", file=sys.stderr)
        sys.exit(3)
    if action == "kill":
        os.write(1, b"last words without newline")
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "talk":
        print("heard from afar")
    if action == "tell":
        tell_progress()
    if action == "sleep":
        time.sleep(300)
    if action == "wait":
        while not os.path.exists(os.path.join(OUT, f"go-{LAUNCH}")):
            time.sleep(0.02)
    if action == "add-up":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(total := torch.tensor([1]))
        note(f"added-{LAUNCH}-{RANK}", total.item())
        dist.destroy_process_group()
    if action == "ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action == "child":
        child()
    if action == "save":
        save_when_told()
    if action == "once" and first_time(f"once-{RANK}"):
        raise RuntimeError("only the first time")


def main() -> None:
    seen = {"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid(), "cwd": os.getcwd(), "file": __file__}
    note(f"worker-{LAUNCH}-{RANK}", seen)
    for wanted in filter(None, os.environ.get("WORKER_DO", "").split(",")):
        rank, action = wanted.split(":")
        if rank in (RANK, "*"):
            act(action)


if __name__ == "__main__":
    main()
