"""Trains with a checkpoint after every step, until it is told to end.

The weights are whole numbers: so they are the same whatever the number of ranks is, and in whatever order gloo adds up.
"""

import os
import sys
import time

sys.path.remove(next(path for path in sys.path if path.endswith("stand_in")))  # that torch has started this process

import torch
import torch.distributed as dist
from notes import note
from worker import LAUNCH, OUT, RANK, hold_rank

PARTS, WEIGHTS, PRIME, PAUSE_S = 8, 16, 1_000_003, 0.02
CHECKPOINT = os.path.join(OUT, "checkpoint.pt")
GENERATION = LAUNCH.rpartition("-")[2]
STEPS = int(os.environ.get("CAMPAIGN_STEPS", "0"))  # 0: until the file `finish` is there


def train_step(weights: torch.Tensor, step: int) -> bool:
    """Make a step with all ranks, each with its parts of the data; return whether it is the last one: rank 0 decides."""
    total = torch.zeros(WEIGHTS + 1, dtype=torch.int64)
    for part in range(dist.get_rank(), PARTS, dist.get_world_size()):
        total[:WEIGHTS] += (weights * (part + 3) + torch.arange(WEIGHTS) * step) % PRIME
    if dist.get_rank() == 0 and (os.path.exists(os.path.join(OUT, "finish")) or step + 1 == STEPS):
        total[WEIGHTS] = 1
    dist.all_reduce(total)
    weights.add_(total[:WEIGHTS]).remainder_(PRIME)
    return bool(total[WEIGHTS])


def main() -> None:
    hold_rank()
    note(f"on-{GENERATION}-{RANK}", int(os.environ["MF_PARALLEL_NODE_INDEX"]))
    dist.init_process_group("gloo")
    steps, weights, is_last = 0, torch.arange(WEIGHTS), False
    if os.path.exists(CHECKPOINT):  # rank 0 writes the next one after a step of all ranks
        steps, weights = torch.load(CHECKPOINT, weights_only=True)
    while not is_last:
        is_last, steps = train_step(weights, steps), steps + 1
        if RANK == "0":
            torch.save((steps, weights), f"{CHECKPOINT}.part")
            os.replace(f"{CHECKPOINT}.part", CHECKPOINT)
            note(f"made-{GENERATION}", steps)
        time.sleep(PAUSE_S)
    if RANK == "0":
        note("trained", {"steps": steps, "weights": weights.tolist()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
