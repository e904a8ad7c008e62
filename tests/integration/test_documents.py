"""Commands of the pages that no other test runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# What the README's flow calls train.py: any script that takes these arguments.
SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
print(f"{args.epochs} epochs at {args.lr} on {os.environ['WORLD_SIZE']} ranks")
"""


def test_the_first_example_of_the_readme_runs(start_flow, tmp_path):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    flow = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    (tmp_path / "flow.py").write_text(flow)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = start_flow(flow="flow.py", folder=tmp_path)
    assert run.wait() == 0, run.text
    assert sorted(re.findall(r"\[rank (\d)\] 2 epochs at 0.1 on 4 ranks", run.text)) == ["0", "1", "2", "3"]


def test_the_scripts_of_the_examples_run_without_metaflow():
    command = "torchrun --standalone --nproc-per-node=2 hello/train.py"
    page = (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")
    assert command in page
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        torchrun, cwd=REPOSITORY / "examples", env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "hello from rank 1 of 2" in ran.stdout
