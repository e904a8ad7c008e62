"""The code of docs/hangs.md about debugging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest
from flow_runs import write_flow
from pages import blocks_of

ALONE = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def code_of(page: str, words: str) -> str:
    """Return the page's only block of Python with these words."""
    (found,) = [block.text for block in blocks_of(page) if block.language == "python" and words in block.text]
    return found


def run_script(folder, text: str, *options: str, given: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*ALONE, *options]
    return subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options", "given"),
    [
        ("answer = 42\nbreakpoint()\nprint('goes on')\n", [], "p answer\nc\n"),
        ("answer = 42\nraise ValueError('goes on')\n", ["-m", "pdb", "-c", "continue"], "p answer\nq\nq\n"),
    ],
    ids=["a breakpoint", "an exception"],
)
def test_pdb_works_in_one_process_of_torchrun(script, options, given, tmp_path):
    ran = run_script(tmp_path, script, "--nproc-per-node=1", *options, "train.py", given=given)
    assert "(Pdb) 42" in ran.stdout
    assert "goes on" in ran.stdout + ran.stderr


@pytest.fixture
def debug_flow(start_flow, tmp_path):
    """Return a function that starts a script as the only rank of a flow, by the page's own call."""

    def start(script: str):
        (tmp_path / "train.py").write_text(script)
        write_flow(tmp_path, code_of("docs/hangs.md", 'DEBUG_RANK":'), "@torchrun(nproc_per_node=1)", size=1)
        return start_flow(flow="flow.py", folder=tmp_path)

    return start


@pytest.mark.long
def test_debugpy_answers_an_editor_in_a_worker(debug_flow, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    flow = debug_flow(code_of("docs/hangs.md", "debugpy.listen").replace("5678", str(unused_port)))
    flow.await_text(f"debugpy waits on port {unused_port}")
    with socket.create_connection(("127.0.0.1", unused_port), 30) as editor:
        assert editor.recv(15) == b"Content-Length:", "the debug adapter protocol"
    worker_of(flow, tmp_path).kill()
    assert flow.wait() == 1
    flow.await_gone()


WAITS = """
import os, time


def load_batch():
    print("waits", flush=True)
    while not os.path.exists("go-on"):
        time.sleep(0.1)


load_batch()
"""


@pytest.mark.long
def test_py_spy_shows_where_a_worker_is(debug_flow, tmp_path):
    flow = debug_flow(WAITS)
    flow.await_text(r"\[rank 0\] waits")
    worker = worker_of(flow, tmp_path)
    py_spy = os.path.join(os.path.dirname(sys.executable), "py-spy")
    dumped = subprocess.run([py_spy, "dump", "--pid", str(worker.pid)], capture_output=True, text=True)
    (tmp_path / "go-on").touch()
    assert flow.wait() == 0, flow.text
    assert "load_batch" in dumped.stdout, dumped.stderr


def worker_of(flow, folder) -> psutil.Process:
    """Return the only worker: the agent's command line has the script, too."""
    lines = [(each, each.cmdline()) for each in flow.processes()]
    script = str(folder / "train.py")
    (worker,) = [each for each, words in lines if words[-1:] == [script] and "torch.distributed.run" not in words]
    return worker
