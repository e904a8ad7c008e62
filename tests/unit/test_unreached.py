"""Torch's store on the control node gives no answer: what an agent makes of that, and that it obeys meanwhile."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import has_signal
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL
from metaflow_extensions.torchrun.plugins.torchrun.worker import agent

STAND_IN = Path(__file__).parents[1] / "stand_in"
HOST = "127.0.0.3"


@pytest.fixture
def silent_port():
    """Return a port that answers nothing: the kernel drops what comes while nobody accepts."""
    with ExitStack() as files:
        store = files.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(2):
            client = files.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(store.getsockname())
        yield store.getsockname()[1]


def test_a_refusal_is_an_answer():
    """torch waits for a store that comes late."""
    with socket.create_server((HOST, 0)) as closed:
        address = "{}:{}".format(*closed.getsockname())
    began = time.monotonic()
    assert agent.await_store(["--node-rank=1", f"--rdzv-endpoint={address}", "--", "--node-rank=0"]) == ""
    assert agent.STORE_S <= time.monotonic() - began < agent.SILENCE_S


def is_trying(pid):
    return any(each.status == psutil.CONN_SYN_SENT for each in psutil.Process(pid).net_connections("tcp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, HALT_SIGNAL])
def test_an_agent_that_tries_obeys(number, silent_port, tmp_path):
    os.mkfifo(path := tmp_path / "agent.workers")
    news = os.open(path, os.O_RDWR)
    options = ["--nnodes=2", "--node-rank=1", f"--rdzv-endpoint={HOST}:{silent_port}", "--nproc-per-node=1"]
    words = [str(tmp_path), str(HALT_SIGNAL), *options, "--no-python", "--", "true"]
    process = subprocess.Popen([sys.executable, AGENT, *words], env={**os.environ, "PYTHONPATH": str(STAND_IN)})
    try:
        eventually(lambda: is_trying(process.pid), "a try")
        process.send_signal(number)
        if number == HALT_SIGNAL:
            eventually(lambda: has_signal(process.pid, "SigBlk", HALT_SIGNAL), "its halt")
            process.terminate()
        assert process.wait(agent.SILENCE_S / 2) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        os.close(news)
