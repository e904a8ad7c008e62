"""Commands of the pages that no other test runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
from pages import REPOSITORY

# What the README's flow calls train.py: any script that takes these arguments.
SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
print(f"{args.epochs} epochs at {args.lr} on {os.environ['WORLD_SIZE']} ranks")
"""
# What the pages' steps and lines call train.py: any script that tells a loss.
ANY_SCRIPT = """
import json, os
with open(os.environ["TORCHRUN_METRICS"], "a") as metrics:
    print(json.dumps({"step": 1, "loss": 0.5}), file=metrics)
"""
# Saves epoch 4 of one model, and loads it into another.
USES_IT = """
def made():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())

first, second = made(), made()
begins = load("model.pt", *first)
save("model.pt", *first, 4)
goes_on = load("model.pt", *second)
files = [name for name in os.listdir() if name.startswith("model")]
print(begins, goes_on, torch.equal(first[0].weight, second[0].weight), files)
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


@pytest.mark.long
def test_the_steps_and_lines_of_the_pages_run(start_flow, tmp_path):
    (tmp_path / "flow.py").write_text(pages.flow_of_pages())
    (tmp_path / "train.py").write_text(ANY_SCRIPT)
    run = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert run.wait(170) == 0, run.text
    told = [f"ran {pages.key(block)!r}" for block in pages.run_in_one_flow() if block.kind == "lines"]
    assert [line for line in told if line not in run.text] == []


@pytest.mark.long
def test_the_first_five_minutes(start_flow, tmp_path):
    """What the page has one type, and what it says that one sees."""
    blocks = pages.blocks_of("docs/start.md")
    script, flow = [block.text for block in blocks if block.language == "python"]
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "flow.py").write_text(flow)
    lines, report = [block.text.strip().splitlines() for block in blocks if not block.language]
    well, failing, show = [block.text for block in blocks if block.text.startswith("python flow.py")]

    def run(command):
        return start_flow(*shlex.split(command)[3:], flow="flow.py", folder=tmp_path, command=shlex.split(command)[2])

    ran = run(well)
    assert ran.wait() == 0, ran.text
    assert all(line in ran.text for line in lines), ran.text
    assert "node 1: exit codes by rank {2: 0, 3: 0}" in ran.text
    failed = run(failing)
    assert failed.wait() == 1, failed.text
    on_any_host = re.sub(r"\(host \S+\)", "(host vm)", failed.text)
    # On a machine that does much else, torchrun may have taken the exit code before the guardian could.
    wanted = [line for line in report if not line.startswith("It exited")]
    assert [line for line in wanted if line not in on_any_host] == [], failed.text
    shown = run(show)
    assert shown.wait() == 0
    assert "ValueError: the loss is not a number" in shown.text


def test_what_the_recipe_saves_is_loaded(tmp_path):
    script = next(block for block in pages.blocks_of("docs/recipes/checkpoints.md") if "def save(" in block.text)
    (tmp_path / "recipe.py").write_text(script.text + USES_IT)
    ran = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0 5 True ['model.pt']\n"), ran.stderr
