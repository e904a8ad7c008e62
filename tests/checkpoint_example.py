"""What the tests of examples/checkpoint share, on this machine and on backends."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "checkpoint"
PLAIN = "torchrun --standalone --nproc-per-node=2 train.py --checkpoints kept --output weights.pt"
# Two ranks, where the page has four: each imports PyTorch for some seconds. They are as many as under plain torchrun.
FEWER = ("--nproc", "1")


def train_plainly(folder: Path, steps: int = 20, ranks: int = 2, first: int = 10) -> Path:
    """Train under plain torchrun, in two goes, the second of which begins where the first has ended; return the weights.

    With `first` 0 there is one go.
    """
    shutil.copytree(EXAMPLE, folder)
    program, *words = shlex.split(PLAIN.replace("--nproc-per-node=2", f"--nproc-per-node={ranks}"))
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    for until in filter(None, (first, steps)):
        words = [*command, "--steps", str(until)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (f"goes on after step {first}" in done.stdout) == (first > 0)
    return folder / "weights.pt"


def end_line(weights: Path, steps: int = 20) -> str:
    """Return what the flow's last step prints of these weights."""
    return f"weights after {steps} steps: {hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}"
