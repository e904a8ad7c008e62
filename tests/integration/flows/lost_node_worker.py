"""Waits for all ranks; in the first generation a worker ends its own node's task, as ``KILLS`` says for its rank."""

import json
import os
import signal
import time
from pathlib import Path

from notes import note

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
restarts, out = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Path(os.environ["GANG_OUT"])


def count_ranks():
    """Return how many ranks have come, when all have."""
    if os.environ.get("WITH_TORCH"):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([1])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()
    note(f"here-{restarts}-{rank}", True)
    while len(found := [*out.glob(f"here-{restarts}-*[0-9]")]) < world_size:
        time.sleep(0.02)
    return len(found)


def stop_node(task):
    """Stop everything of this node, as if its machine had gone: what stands beside the task has its pid as a word."""
    lines = {int(each.name): (each / "cmdline").read_bytes().split(b"\0") for each in Path("/proc").glob("[0-9]*")}
    beside = [pid for pid, words in lines.items() if str(task).encode() in words]
    for pid in [*beside, task, os.getppid(), os.getpid()]:
        os.kill(pid, signal.SIGSTOP)


facts = (count_ranks(), world_size, int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]))
note(f"rank-{restarts}-{rank}", facts)
kills = dict(each.split(":") for each in os.environ["KILLS"].split(","))
if restarts == 0:
    if (name := kills.get(str(rank))) is not None:
        task = json.loads((out / f"task-{os.environ['MF_PARALLEL_NODE_INDEX']}").read_text())
        if name == "STOP":
            stop_node(task)
        os.kill(task, getattr(signal, f"SIG{name}"))
    time.sleep(600 if min(map(int, kills)) < world_size else 0)
