"""The ranks meet at every step, until one of them fails and the others wait for it."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def fail(how: str, step: int) -> None:
    print(f"rank {dist.get_rank()} now fails on purpose, by {how}", flush=True)
    if how == "exception":
        raise ValueError(f"the loss is not a number at step {step}")
    if how == "exit":
        sys.exit(7)
    # The kernel does the same when memory runs out: no handler runs, and there is no traceback.
    os.kill(os.getpid(), signal.SIGKILL)


def work(args: argparse.Namespace, device: torch.device) -> int:
    """Return the number of steps done. In each step, all ranks meet once."""
    for step in range(1, args.steps + 1):
        if args.how != "none" and dist.get_rank() == args.fail_rank and step == args.fail_at_step:
            fail(args.how, step)
        met = torch.ones(1, device=device)
        # The other ranks wait here for the one that failed.
        dist.all_reduce(met)
        print(f"step {step}: met {int(met.item())} ranks", flush=True)
        time.sleep(args.step_s)
    return args.steps


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["exception", "exit", "kill", "none"], default="exception")
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--fail-at-step", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.2, help="pause between steps, in seconds")
    parser.add_argument("--output-dir", type=Path, help="rank 0 writes done.json here when all steps are done")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    steps_done = work(args, device)
    if args.output_dir and dist.get_rank() == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        report = {"steps_done": steps_done, "world_size": dist.get_world_size()}
        (args.output_dir / "done.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
