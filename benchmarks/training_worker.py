"""Runs a training script unchanged, and leaves how long its steps took; see `step_time.py`."""

import json
import os
import runpy
import statistics
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# The first steps make buffers and choose kernels.
WARM_UP = 10


def main(script: str) -> None:
    """Run it as Python would, and note the time between the ends of two steps of its optimizer."""
    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
    took = [after - before for before, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    told = {"steps": len(took), "step_s": statistics.median(took), "threads": torch.get_num_threads()}
    path = os.path.join(os.environ["BENCHMARK_FOLDER"], f"steps-{os.environ['RANK']}")
    with open(path, "w", encoding="ascii") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(sys.argv[1])
