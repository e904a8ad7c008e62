"""Torch's store on the control node gives no answer: what an agent finds out, and what it does then."""

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
from limits import limit_s
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import has_signal
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import AGENT, HALT_SIGNAL
from metaflow_extensions.torchrun.plugins.torchrun.worker import agent

STAND_IN = Path(__file__).parents[1] / "stand_in"
SILENCE_S, STORE_S = 2.0, 0.2


@pytest.fixture
def silent():
    """Return a function that lets a port answer nothing: the kernel drops what comes while nobody accepts."""
    with ExitStack() as files:

        def make(host, port=0):
            store = files.enter_context(socket.create_server((host, port), backlog=0))
            for _ in range(2):
                client = files.enter_context(socket.socket())
                client.setblocking(False)
                with suppress(BlockingIOError):
                    client.connect(store.getsockname())
            return store

        yield make


@pytest.fixture
def found(monkeypatch):
    """Return a function that lets an agent look for the store, and returns what it found, and after how long."""
    for name, value in (("SILENCE_S", SILENCE_S), ("STORE_S", STORE_S)):
        monkeypatch.setattr(agent, name, value)

    def find(port, host="127.0.0.1", rank=1):
        began = time.monotonic()
        why = agent.await_store([f"--node-rank={rank}", f"--rdzv-endpoint={host}:{port}", "--", "--node-rank=0"])
        return why, time.monotonic() - began

    return find


def free_port(host):
    with socket.create_server((host, 0)) as closed:
        return closed.getsockname()[1]


def test_silence_is_told_after_some_tries(found, silent):
    port = silent("127.0.0.1").getsockname()[1]
    why, seconds = found(port)
    assert why == "timed out"
    assert SILENCE_S <= seconds < SILENCE_S + limit_s(1)
    assert found(port, rank=0)[1] < STORE_S, "the node that has the store"


def test_a_refusal_is_an_answer(found):
    why, seconds = found(free_port("127.0.0.1"))
    assert why == "", "torch waits for a store that comes late"
    assert STORE_S <= seconds < SILENCE_S


def is_trying(pid):
    return any(each.status == psutil.CONN_SYN_SENT for each in psutil.Process(pid).net_connections("tcp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, HALT_SIGNAL])
def test_an_agent_that_tries_obeys(number, silent, tmp_path):
    port = silent("127.0.0.3").getsockname()[1]
    os.mkfifo(path := tmp_path / "agent.workers")
    news = os.open(path, os.O_RDWR)
    options = ["--nnodes=2", "--node-rank=1", f"--rdzv-endpoint=127.0.0.3:{port}", "--nproc-per-node=1"]
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
