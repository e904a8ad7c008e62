"""A profile of one rank: what the gang asks and answers, and what a node finds out of a worker that can't be asked."""

import asyncio
import atexit
import gzip
import runpy
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from gang_of import GangOf
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import profiles
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call

OF = {"rank": 3, "seconds": 0.1}


def running():
    gang = GangOf(2)
    gang.all_ready(max_restarts=1)
    gang.post(gang.state.ask("a", "profile", OF))
    return gang


def test_the_node_of_the_rank_alone_is_asked_and_tells_where_the_trace_is():
    gang = running()
    assert ([(ask.id, ask.of) for ask in gang.got(1, "Ask")], gang.got(0, "Ask")) == ([("a", OF)], [])
    for asked in ("another", "a"):
        assert gang.state.answers == {}
        gang.say(1, say.Report("answer", 0, 0, {"id": asked, "found": {"parts": ["key"]}}))
    assert gang.state.answers == {"a": {"parts": ["key"]}}


def test_who_waits_for_a_profile_hears_that_its_worker_has_ended():
    gang = running()
    gang.all_ended()
    gang.post(gang.state.ask("b", "profile", OF))
    assert gang.state.answers == {"a": {"why": "its node has no workers"}, "b": {"why": "no such rank runs"}}


class Server:
    """Answers one request in the place of torch's server in a worker."""

    def __init__(self, folder, answer):
        self._answer, self._socket = answer, socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "recorders"))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        client, _ = self._socket.accept()
        self.asked = client.recv(65536)
        with suppress(BrokenPipeError):
            client.sendall(self._answer)
        client.close()

    def close(self):
        self._thread.join()
        self._socket.close()


def answer(status, body):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def node(tmp_path):
    """Return a node with ranks 2 and 3, the second in its folder, and what its task is told."""
    folder = write(tmp_path / "run" / "attempt_0" / "1" / "stdout", "").parent
    call, told = Call("t.py", (), False, nproc=2, num_nodes=2, node_index=1, python="python3"), []
    side = SimpleNamespace(tell_task=lambda *frame: told.append(frame))
    go = SimpleNamespace(launch=0, generation=1)
    workers = SimpleNamespace(call=call, go=go, folder=str(tmp_path), side=side, running=lambda: {3: 1})
    return SimpleNamespace(folder=folder, told=told, profile=lambda **of: asyncio.run(ask(workers, of)))


async def ask(workers, of):
    return await profiles.profile(workers, "a", **{**OF, **of})


def test_the_task_stores_the_trace(node):
    server = Server(node.folder, answer("200 OK", b'{"traceEvents": []}'))
    assert node.profile() is None
    server.close()
    assert server.asked.startswith(b"POST /handler/torchrun_profile?duration=0.1 ")
    ((what, path, *about),) = node.told
    assert (what, about) == ("profile", ["a", 0, 1])
    with gzip.open(path) as file:
        assert file.read() == b'{"traceEvents": []}'


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (None, "it has no process group, its PyTorch has no server for it"),
        (answer("501 Not Implemented", b"ImportError: no such module"), "it can't: ImportError: no such"),
        (answer("404 Not Found", b""), "it can't: 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900000000\r\n\r\n" + b"x" * 3_000_000, "its trace is larger than 2 MiB"),
        (b"nonsense", "IncompleteReadError"),
    ],
)
def test_a_worker_without_an_answer_is_told_of(served, why, node, monkeypatch):
    monkeypatch.setattr(profiles, "MAX_BYTES", 2 << 20)
    server = None if served is None else Server(node.folder, served)
    assert why in node.profile()["why"]
    if server is not None:
        server.close()
    assert node.told == []


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_worker_is_profiled_unless_its_script_profiles_itself(is_busy, monkeypatch):
    """Two at a time crash torch. Afterwards gloo's thread gets a moment at the worker's end."""
    made, at_exit, told = [], [], {}
    torch = SimpleNamespace(autograd=SimpleNamespace(profiler=SimpleNamespace(_is_profiler_enabled=is_busy)))
    debug = SimpleNamespace(_handlers=SimpleNamespace(_torch_profile=lambda *asked: made.append(asked)))
    for name, module in (("torch", torch), ("torch.distributed", None), ("torch.distributed.debug", debug)):
        monkeypatch.setitem(sys.modules, name, module)
    response = SimpleNamespace(
        set_status=partial(told.__setitem__, "status"), set_content=lambda text, _: told.update(text=text)
    )
    worker = runpy.run_path(str(Path(profiles.__file__).parents[1] / "worker" / "process_groups.py"))
    monkeypatch.setattr(atexit, "register", lambda *what: at_exit.append(what))
    worker["_profile"]("request", response)
    assert made == [("request", response)] * (not is_busy)
    assert at_exit == [(time.sleep, 0.2)] * (not is_busy)
    assert told == (
        {"status": 501, "text": b"RuntimeError: the script itself uses torch.profiler now"} if is_busy else {}
    )


def test_a_rank_that_has_ended_is_not_asked(node):
    assert node.profile(rank=2) == {"why": "it does not run"}
