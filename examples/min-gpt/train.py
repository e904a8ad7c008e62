"""Train a character-level GPT on Python's reference manual, then let it write."""

import argparse
import gc
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import decode, encode, load_text, split
from model import GPT, GPTConfig
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

PROMPT = "The "


def pick_device() -> torch.device:
    """Return one GPU per process where this node has enough of them, else the CPU."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


class Blocks:
    """Random blocks of a text, each with the same block one character later; each rank draws its own."""

    def __init__(self, tokens: torch.Tensor, block_size: int, batch_size: int, device: torch.device) -> None:
        self.tokens = tokens
        self.offsets = torch.arange(block_size)
        self.batch_size = batch_size
        self.device = device

    def draw(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        last_start = len(self.tokens) - len(self.offsets) - 1
        starts = torch.randint(last_start + 1, (self.batch_size, 1), generator=generator)
        places = starts + self.offsets
        return self.tokens[places].to(self.device), self.tokens[places + 1].to(self.device)


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, blocks: Blocks, batches: int = 4) -> float:
    """Return the mean loss over all ranks, on the same blocks at every call; each rank has other blocks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = [loss_of(model, blocks.draw(generator)) for _ in range(batches)]
    return mean_over_ranks(torch.stack(losses).mean())


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return a rate that rises in the first tenth of the training, then falls along a cosine to a twentieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def report(**numbers: float) -> None:
    """Report this rank's progress for the card; under plain torchrun nobody reads it."""
    with open(os.environ.get("TORCHRUN_METRICS", os.devnull), "a") as metrics:
        print(json.dumps(numbers), file=metrics)


def train(model: GPT, training: Blocks, held_out: Blocks, args: argparse.Namespace) -> list[dict[str, float]]:
    """Train; return the losses at the start and after every `eval_every` steps."""
    device = training.device
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    # With `fused`, the optimizer's step is one kernel. With separate kernels and two threads for each rank, a busy CPU
    # once rounded the first step differently on two ranks (torch 2.13), and their weights differed.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    started = time.monotonic()
    history: list[dict[str, float]] = []
    recent: list[torch.Tensor] = []

    def note(step: int) -> None:
        train_loss = mean_over_ranks(torch.stack(recent).mean())
        entry = {"step": step, "train_loss": train_loss, "held_out_loss": held_out_loss(model, held_out)}
        entry["elapsed_s"] = time.monotonic() - started
        history.append(entry)
        if dist.get_rank() == 0:
            line = "step {step:>4}: loss {train_loss:.3f} in training, {held_out_loss:.3f} held out, {elapsed_s:.0f} s"
            print(line.format(**entry), flush=True)

    for step in range(args.steps):
        lr = learning_rate(step, args.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(ddp, training.draw(generator))
        recent.append(loss.detach())
        if step == 0:
            note(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step=step + 1, total=args.steps, loss=loss.item(), lr=lr)
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            note(step + 1)
            recent.clear()
    return history


def same_on_all_ranks(model: GPT) -> bool:
    """Return whether all ranks ended with the same weights, bit for bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = weights.clone(), weights.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


def write_sample(model: GPT, vocabulary: str, count: int, device: torch.device) -> str:
    prompt = encode(PROMPT, vocabulary).unsqueeze(0).to(device)
    return decode(model.generate(prompt, count, temperature=0.7)[0], vocabulary)


def save(output_dir: Path, model: GPT, vocabulary: str, sample: str, metrics: dict[str, Any]) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = {"config": asdict(model.config), "vocabulary": vocabulary, "weights": model.state_dict()}
    torch.save(checkpoint, output_dir / "model.pt")
    (output_dir / "sample.txt").write_text(sample)
    (output_dir / "metrics.json").write_text(json.dumps(metrics))


def run(args: argparse.Namespace, device: torch.device) -> None:
    text = load_text()
    vocabulary = "".join(sorted(set(text)))
    training_text, held_out_text = split(encode(text, vocabulary))

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(vocabulary))).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"{len(text):,} characters, {len(vocabulary)} different ones; a model of {parameters:,} parameters")
    block_size = model.config.block_size
    training = Blocks(training_text, block_size, args.batch_size, device)
    held_out = Blocks(held_out_text, block_size, args.batch_size, device)
    history = train(model, training, held_out, args)

    metrics = {
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "characters": len(text),
        "parameters": parameters,
        "history": history,
        "same_on_all_ranks": same_on_all_ranks(model),
    }
    if dist.get_rank() == 0:
        sample = write_sample(model, vocabulary, args.sample_length, device)
        print(f"the model writes:\n{sample}")
        if args.output_dir:
            save(args.output_dir, model, vocabulary, sample, metrics)


def leave_group() -> None:
    # DDP's reference cycles keep the group's gloo threads alive. A thread that still runs while Python exits aborts the
    # process ("terminate called without an active exception"). Garbage collection ends the threads here.
    gc.collect()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8, help="blocks per rank and step")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between two lines of losses")
    parser.add_argument("--sample-length", type=int, default=500, help="characters to write at the end")
    parser.add_argument("--output-dir", type=Path, help="rank 0 writes model.pt, sample.txt and metrics.json here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(args, device)
    leave_group()


if __name__ == "__main__":
    main()
