"""Commands and code of the pages that no other test runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pages
import pytest
from flow_runs import ABORTED_AT_EXIT, Running, content_of, write_flow
from pages import REPOSITORY

END_S = 240  # on a machine that does much else
# What the pages' steps and lines call train.py: any script that tells a loss.
ANY_SCRIPT = """
from metaflow_torchrun import report
report(step=1, loss=0.5)
"""
# What trains with the recipe: each rank would begin with weights of its own, and the last one fails once.
USES_IT = """
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
begin = load("model.pt", model, optimizer)
steps = len(optimizer.state_dict()["state"])
print(f"BEGIN restart {restart} epoch {begin} state {steps} weights {model.weight.sum().item():.6f}")
parallel = torch.nn.parallel.DistributedDataParallel(model)
for epoch in range(begin, 4):
    parallel(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save("model.pt", model, optimizer, epoch)
    dist.barrier()
    if (epoch, restart, dist.get_rank()) == (1, 0, 1):
        raise RuntimeError("once")
print(f"END {begin} {sorted(os.listdir())}")
del parallel
dist.destroy_process_group()
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


@pytest.mark.timeout(3 * END_S)
def test_the_commands_of_the_readme_run_its_example(tmp_path):
    """All but the installation and the server for cards; the README shows the first part of the file."""
    shutil.copytree(REPOSITORY / "examples" / "first", folder := tmp_path / "examples" / "first")
    blocks = pages.blocks_of("README.md")
    flow = next(block.text for block in blocks if block.kind == "flow")
    assert (folder / "flow.py").read_text().startswith(flow)
    run, look = (block.text for block in blocks if "python flow.py" in block.text and block.language == "bash")
    (loss,) = re.findall(r"\] loss (\d+\.\d+)\n", pasted(run, tmp_path))
    assert float(loss) < 0.1
    shown = pasted(f"export METAFLOW_USER=me\n{look.partition('python flow.py card')[0]}", folder)
    assert "step 200 of 200 (100 %)" in shown, shown


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
    shutil.copy(REPOSITORY / "examples" / "first" / "flow.py", tmp_path)
    step, client, script, call = (block.text for block in blocks if block.language == "python")
    assert textwrap.indent(step, " " * 4) in (tmp_path / "flow.py").read_text()
    lines, _, report = [block.text.strip().splitlines() for block in blocks if not block.language]
    well, show, failing, logs = [block.text for block in blocks if block.text.startswith("python flow.py")]

    def run(command):
        return start_flow(*shlex.split(command)[3:], flow="flow.py", folder=tmp_path, command=shlex.split(command)[2])

    def unlike(text):
        return re.sub(r"trained \d+ s", "trained 10 s", text)

    ran = run(well)
    assert ran.wait() == 0, ran.text
    assert [line for line in lines if line not in unlike(ran.text)] == []
    words = [sys.executable, "-c", client]
    told = subprocess.run(words, cwd=tmp_path, env=ran.env, capture_output=True, text=True)
    assert re.fullmatch(r"0\.\d+ \d+\.\d+ \[\(\d, \d+\.\d+\), .*\)\]\n", told.stdout), told.stderr
    failed = run(failing)
    assert failed.wait() == 1, failed.text
    # Which rank is the first, its timing decides.
    said, *expected = (re.sub(r"rank \d on node \d \(host \S+\)", "a rank", text) for text in (failed.text, *report))
    assert [line for line in expected if line not in said] == []
    for command, said in ((show, "ValueError: the loss is inf"), (logs, "[rank 0]")):
        shown = run(command)
        assert shown.wait() == 0
        assert said in shown.text
    (tmp_path / "train.py").write_text(script)
    flow = (tmp_path / "flow.py").read_text()
    old = flow[flow.index("self.result = current.torch.run(") : flow.index("        self.next(self.join)")]
    (tmp_path / "flow.py").write_text(flow.replace(old, call))
    ran = run(well)
    assert ran.wait() == 0, ran.text
    assert all(f"rank {rank} of 4 is done" in ran.text for rank in range(4))


REPORTS = """
self.result = current.torch.run("train.py", nproc_per_node=2, warm="workers")
print("METRICS", current.parallel.node_index, self.result.metrics, len(self.result.history))
"""
DRAWS = """
@card
@step
def join(self, inputs):
    from metaflow.cards import VegaChart

    curve = inputs[0].result.history["loss"]
    rows = [{"step": step, "loss": loss} for step, loss in curve]
    axes = {"x": ("step", "quantitative"), "y": ("loss", "quantitative")}
    axes = {axis: {"field": name, "type": kind} for axis, (name, kind) in axes.items()}
    current.card.append(VegaChart({"data": {"values": rows}, "mark": "line", "encoding": axes}))
    self.next(self.end)
"""


def test_what_a_script_reports_reaches_the_result_and_a_later_step_draws_it(start_flow, tmp_path):
    """The first script of docs/metrics.md, as a worker that was a spare."""
    script = next(b.text for b in pages.blocks_of("docs/metrics.md") if b.text.startswith("from metaflow_torchrun"))
    (tmp_path / "train.py").write_text(script)
    write_flow(tmp_path, REPORTS, more=DRAWS)
    run = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert run.wait(170) == 0, run.text
    last = "{'step': 999, 'total': 1000, 'loss': 0.001}"
    assert [f"METRICS {node} {last} {kept}" in run.text for node, kept in ((0, 1), (1, 0))] == [True, True], run.text
    (page,) = run.home.parent.rglob("cards/default*.html")
    assert '{"step": 999, "loss": 0.001}' in content_of(page.read_text())


def test_with_the_recipe_all_ranks_go_on_from_one_epoch_though_each_node_has_its_own_disk(start_flow, tmp_path):
    script = next(block for block in pages.blocks_of("docs/checkpoints.md") if "def save(" in block.text)
    (tmp_path / "recipe.py").write_text(script.text + USES_IT)
    own_disk = (
        'folder = f"disk-{current.parallel.node_index}"\nos.mkdir(folder)\ncurrent.torch.run("recipe.py", cwd=folder)'
    )
    write_flow(tmp_path, own_disk, "@torchrun(max_restarts=1)", head="import os")
    run = start_flow(flow="flow.py", folder=tmp_path)
    assert run.wait(170) == 0, run.text
    begun = re.findall(r"\[rank (\d)\] BEGIN restart (\d) epoch (\d) state (\d) weights (\S+)", run.text)
    first, second = [[each for each in begun if each[1] == restart] for restart in "01"]
    assert [each[2:4] for each in first] == [("0", "0")] * 2, run.text
    assert sorted(each[0] for each in second) == ["0", "1"]
    assert {each[2:] for each in second} == {("2", "2", second[0][4])}, (
        "all have epoch, optimizer and weights of rank 0"
    )
    ends = sorted(re.findall(r"\[rank (\d)\] END 2 (.*)", run.text))
    assert ends == [("0", "['model.pt']"), ("1", "[]")]


@pytest.mark.long
def test_debugpy_answers_an_editor_in_a_worker(start_flow, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    python = [block.text for block in pages.blocks_of("docs/hangs.md") if block.language == "python"]
    (script,), (call,) = ([text for text in python if words in text] for words in ("debugpy.listen", 'DEBUG_RANK":'))
    (tmp_path / "train.py").write_text(script.replace("5678", str(unused_port)))
    write_flow(tmp_path, call, "@torchrun(nproc_per_node=1)", size=1)
    flow = start_flow(flow="flow.py", folder=tmp_path)
    flow.await_text(f"debugpy waits on port {unused_port}")
    with socket.create_connection(("127.0.0.1", unused_port), 30) as editor:
        assert editor.recv(15) == b"Content-Length:", "the debug adapter protocol"
    script = str(tmp_path / "train.py")
    (worker,) = [each for each in flow.processes() if (words := each.cmdline())[-1] == script and "-m" not in words]
    worker.kill()
    assert flow.wait() == 1
    flow.await_gone()
