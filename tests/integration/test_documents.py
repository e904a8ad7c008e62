"""Commands of the pages that no other test runs."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from flow_runs import Running
from pages import REPOSITORY

END_S = 240  # on a machine that does much else
# CPython before 3.14 ends gloo's threads at its own end, and C++ aborts: one run in hundreds, under torchrun alone, too.
ABORTED_AT_EXIT = "terminate called without an active exception"
# What the pages' steps and lines call train.py: any script that tells a loss.
ANY_SCRIPT = """
from metaflow_torchrun import report
report(step=1, loss=0.5)
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


def pasted(command: str, folder: Path) -> str:
    """Run a page's block of commands in a shell, as a user does who has set nothing, and return what it has written."""
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHRUN_TESTED_BY": os.environ["TORCHRUN_TESTED_BY"],
    }
    for _ in range(2):
        run = Running(["bash", "-ec", command], folder, env, one_stream=True)
        status = run.wait(END_S)
        if status == 0 or ABORTED_AT_EXIT not in run.text:
            break
    assert status == 0, run.text
    return run.text


@pytest.mark.timeout(2 * END_S)
def test_the_example_of_the_readme_runs_as_it_is_pasted(tmp_path):
    blocks = pages.blocks_of("README.md")
    script, flow = [block.text for block in blocks if block.language == "python"][:2]
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "flow.py").write_text(flow)
    (command,) = [block.text for block in blocks if "python flow.py run\n" in block.text]
    losses = re.findall(r"\[rank (\d)\] epoch (\d): loss (\d+\.\d+)", pasted(command, tmp_path))
    assert sorted({(int(rank), int(epoch)) for rank, epoch, _ in losses}) == [
        (r, e) for r in range(4) for e in range(5)
    ]
    by_epoch = [[float(loss) for _, epoch, loss in losses if int(epoch) == each] for each in (0, 4)]
    assert sum(by_epoch[1]) < sum(by_epoch[0]) / 2


@pytest.mark.long
@pytest.mark.timeout(5 * END_S)
def test_one_gpu_and_many_train_alike(tmp_path):
    """Run the commands of docs/from-one-gpu.md; the losses are near those in its table."""
    example = REPOSITORY / "examples" / "one-gpu"
    for file in example.glob("*.py"):
        shutil.copy(file, tmp_path)
    page = pages.read("docs/from-one-gpu.md")
    blocks = pages.blocks_of("docs/from-one-gpu.md")
    before, one, four, flow = [line for b in blocks if b.language == "bash" for line in b.text.splitlines()]

    def last_loss(command: str) -> float:
        text = pasted(f"export METAFLOW_USER=me\n{command}", tmp_path)
        assert (tmp_path / "model.pt").exists()
        (tmp_path / "model.pt").unlink()
        first, *_, last = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", text)]
        assert last < first / 2
        return last

    losses = {command: last_loss(command) for command in (before, one, four, flow)}
    assert "--nproc-per-node=1 " in one
    assert losses[four] == pytest.approx(losses[one], abs=0.001), losses
    assert losses[flow] == pytest.approx(losses[one], abs=0.001), losses
    assert losses[before] == pytest.approx(losses[one], abs=0.05), losses
    shown = {name: float(loss) for name, loss in re.findall(r"^\| `(\w+\.py`.*) \| (\d\.\d+) \|$", page, re.MULTILINE)}
    assert [*shown.values()] == pytest.approx([losses[before], losses[one], losses[flow]], abs=0.05), shown


@pytest.mark.long
def test_the_scripts_of_the_examples_run_without_metaflow():
    command = "torchrun --standalone --nproc-per-node=2 hello/train.py"
    page = (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")
    assert command in page
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(torchrun, cwd=REPOSITORY / "examples", env=env, capture_output=True, text=True, check=False)
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
    script, flow = [block.text for block in blocks if block.language == "python"][:2]
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
    # On a machine that does much else, torchrun may have taken the exit code before the supervisor could.
    wanted = [line for line in report if not line.startswith("It exited")]
    assert [line for line in wanted if line not in on_any_host] == [], failed.text
    shown = run(show)
    assert shown.wait() == 0
    assert "ValueError: the loss is not a number" in shown.text


REPORTS = """
from metaflow import FlowSpec, card, current, step, torchrun


class Reports(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun
    @step
    def train(self):
        self.result = current.torch.run("train.py", nproc_per_node=2, warm="workers")
        print("METRICS", current.parallel.node_index, self.result.metrics, len(self.result.history))
        self.next(self.join)

{join}
    @step
    def end(self):
        pass


if __name__ == "__main__":
    Reports()
"""


def test_what_a_script_reports_reaches_the_result_and_a_later_step_draws_it(start_flow, tmp_path):
    """The first script of docs/metrics.md, as a worker that was a spare, and the join of that page."""
    script, join = (
        next(block.text for block in pages.blocks_of("docs/metrics.md") if block.text.startswith(first))
        for first in ("from metaflow_torchrun", "@card")
    )
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "flow.py").write_text(REPORTS.format(join=pages.indented(join)))
    run = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert run.wait(170) == 0, run.text
    last = "{'step': 999, 'total': 1000, 'loss': 0.001}"
    assert [f"METRICS {node} {last} {kept}" in run.text for node, kept in ((0, 1), (1, 0))] == [True, True], run.text
    (page,) = run.home.parent.rglob("cards/default*.html")
    drawn = base64.b64decode(re.search(r'__MF_DATA__\["[^"]*"\] = "([A-Za-z0-9+/=]*)"', page.read_text())[1]).decode()
    assert '{"step": 999, "loss": 0.001}' in drawn


def test_what_the_recipe_saves_is_loaded(tmp_path):
    script = next(block for block in pages.blocks_of("docs/recipes/checkpoints.md") if "def save(" in block.text)
    (tmp_path / "recipe.py").write_text(script.text + USES_IT)
    ran = subprocess.run([sys.executable, "recipe.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0 5 True ['model.pt']\n"), ran.stderr
