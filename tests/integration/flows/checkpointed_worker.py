"""A worker without torch that goes on from the last checkpoint; each of two ranks saves a part of it.

``PLAN`` says what happens in which attempt and restart, and after how many steps: ``raise``; ``wait``, until SIGTERM
comes, and save; or ``die``, where the test takes rank 1's node away before it has saved its part.
"""

import json
import math
import os
import signal
import tempfile
import time
from pathlib import Path

from checkpoints import InMetaflow, find_last, save_part
from notes import note

STEPS, EVERY = 10, 2
RANK = int(os.environ["RANK"])


def trained(weights: list, step: int, rank: int) -> list:
    """Return the weights after one more step."""
    return [0.9 * weight + math.sin(step * (rank + 2) + place) for place, weight in enumerate(weights)]


def save(store: InMetaflow, weights: list, step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{RANK}.json").write_text(json.dumps(weights))
        save_part(store, Path(folder), step, RANK, 2)


def resume(store: InMetaflow, now: str) -> tuple:
    """Return step and weights to go on from; no rank saves before both know it."""
    step, weights = 0, [0.0] * 3
    if (last := find_last(store)) is not None:
        step, keys = last
        with tempfile.TemporaryDirectory() as folder:
            for key in keys:
                store.load(key, Path(folder))
            assert sorted(os.listdir(folder)) == ["0.json", "1.json"]
            weights = json.loads(Path(folder, f"{RANK}.json").read_text())
    note(f"began-{now}-{RANK}", step)
    while not os.path.exists(os.path.join(os.environ["GANG_OUT"], f"began-{now}-{1 - RANK}")):
        time.sleep(0.02)
    return step, weights


def do(what: str, store: InMetaflow, weights: list, step: int, told: list) -> None:
    """Do what the plan says after a step; where that is not to fail, go on when SIGTERM has come."""
    if what == "raise" and RANK == 1:
        raise RuntimeError("only the first time")
    if what == "die" and RANK == 0:
        save(store, weights, step)
        note("saved-alone", step)
    if what == "wait":
        note(f"waits-{RANK}", step)
    while not told:
        time.sleep(0.02)
    if what == "wait":
        save(store, weights, step)


def main() -> None:
    now = f"{os.environ['ATTEMPT']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    what, when = json.loads(os.environ["PLAN"]).get(now, ("", 0))
    store, told = InMetaflow(), []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    step, weights = resume(store, now)
    while step < STEPS:
        step, weights = step + 1, trained(weights, step, RANK)
        if step == when:
            do(what, store, weights, step, told)
            return
        if step % EVERY == 0:
            save(store, weights, step)
    note(f"ended-{RANK}", weights)


if __name__ == "__main__":
    main()
