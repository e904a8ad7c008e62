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


def train_plainly(folder: Path) -> Path:
    """Train under plain torchrun, in two goes, the second of which begins where the first has ended; return the weights."""
    shutil.copytree(EXAMPLE, folder)
    program, *words = shlex.split(PLAIN)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    for until in (10, 20):
        words = [*command, "--steps", str(until)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on after step 10" in done.stdout
    return folder / "weights.pt"


def end_line(weights: Path) -> str:
    """Return what the flow's last step prints of these weights."""
    return f"weights after 20 steps: {hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}"
