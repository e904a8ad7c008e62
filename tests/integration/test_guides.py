"""The code of the guides: debugging."""

from __future__ import annotations

import socket

import pytest
from flow_runs import write_flow
from pages import blocks_of


def code_of(page: str, words: str) -> str:
    """Return the page's only block of Python with these words."""
    (found,) = [block.text for block in blocks_of(page) if block.language == "python" and words in block.text]
    return found


@pytest.mark.long
def test_debugpy_answers_an_editor_in_a_worker(start_flow, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused_port = listener.getsockname()[1]
    (tmp_path / "train.py").write_text(code_of("docs/hangs.md", "debugpy.listen").replace("5678", str(unused_port)))
    write_flow(tmp_path, code_of("docs/hangs.md", 'DEBUG_RANK":'), "@torchrun(nproc_per_node=1)", size=1)
    flow = start_flow(flow="flow.py", folder=tmp_path)
    flow.await_text(f"debugpy waits on port {unused_port}")
    with socket.create_connection(("127.0.0.1", unused_port), 30) as editor:
        assert editor.recv(15) == b"Content-Length:", "the debug adapter protocol"
    script = str(tmp_path / "train.py")
    (worker,) = [each for each in flow.processes() if (words := each.cmdline())[-1] == script and "-m" not in words]
    worker.kill()
    assert flow.wait() == 1
    flow.await_gone()
