"""Ranks work in step with each other; rank 2 hangs, or is killed once."""

import argparse
import json
import os
import signal
import time

import torch
import torch.distributed as dist

AT_STEP = 4
STEPS = 12


def load_batch(how: str, step: int) -> torch.Tensor:
    if dist.get_rank() == 2 and step == AT_STEP:
        if how == "hang":
            time.sleep(600)  # longer than any hang_timeout_s of these flows
        elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["hang", "killed"], required=True)
    how = parser.parse_args().how
    dist.init_process_group("gloo")
    for step in range(1, STEPS + 1):
        batch = load_batch(how, step)
        dist.all_reduce(batch)
        if dist.get_rank() == 0:
            with open(os.environ["TORCHRUN_METRICS"], "a") as metrics:
                print(json.dumps({"step": step, "total": STEPS, "loss": 2 / step}), file=metrics)
        print(f"step {step}: met {int(batch.item())} ranks", flush=True)
        time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
