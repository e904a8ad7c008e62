"""The code of the guides: data on every node, debugging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from flow_runs import write_flow
from pages import blocks_of

BARRIER = """
import torch.distributed as dist
dist.init_process_group("gloo")
def load_data(folder):
    print("loads into", folder, flush=True)
"""


def code_of(page: str, words: str) -> str:
    """Return the page's only block of Python with these words."""
    (found,) = [block.text for block in blocks_of(page) if block.language == "python" and words in block.text]
    return found


def test_the_flow_with_a_small_file_gives_it_to_every_rank(start_flow, tmp_path):
    (tmp_path / "flow.py").write_text(code_of("docs/data.md", "IncludeFile(").replace("/tmp/", f"{tmp_path}/"))
    (tmp_path / "labels.txt").write_text("cat dog")
    (tmp_path / "train.py").write_text("import sys\nprint('has', open(sys.argv[2]).read())")
    flow = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert flow.wait() == 0, flow.text
    assert [f"[rank {rank}] has cat dog" in flow.text for rank in range(4)] == [True] * 4


@pytest.mark.long
def test_shards_are_disjoint_and_whole_and_local_rank_0_loads_while_the_others_wait(tmp_path):
    around: dict = {}
    exec(code_of("docs/data.md", "def own_files"), around)
    assert [around["own_files"]("dbeac", rank, 2) for rank in range(2)] == [["a", "c", "e"], ["b", "d"]]
    script = BARRIER + code_of("docs/data.md", "dist.barrier()") + "dist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.count("loads into /tmp/train")) == (0, 1), ran.stderr


@pytest.mark.long
def test_debugpy_answers_an_editor_in_a_worker(start_flow, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    (tmp_path / "train.py").write_text(code_of("docs/debugging.md", "debugpy.listen").replace("5678", str(unused_port)))
    write_flow(tmp_path, code_of("docs/debugging.md", 'DEBUG_RANK":'), "@torchrun(nproc_per_node=1)", size=1)
    flow = start_flow(flow="flow.py", folder=tmp_path)
    flow.await_text(f"debugpy waits on port {unused_port}")
    with socket.create_connection(("127.0.0.1", unused_port), 30) as editor:
        assert editor.recv(15) == b"Content-Length:", "the debug adapter protocol"
    script = str(tmp_path / "train.py")
    (worker,) = [each for each in flow.processes() if (words := each.cmdline())[-1] == script and "-m" not in words]
    worker.kill()
    assert flow.wait() == 1
    flow.await_gone()
