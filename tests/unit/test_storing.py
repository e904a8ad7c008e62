"""What a function's ranks leave for other nodes: a phase of its own, with real nodes, a real channel and a slow store.

The nodes are threads of this process. Their agents are small programs that leave values as torchrun's workers would.
"""

import queue
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from botocore.config import Config
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import function_call, transfer
from metaflow_extensions.torchrun.plugins.torchrun.devices import Machine
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed, LaunchHung, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.function_call import FunctionCall
from metaflow_extensions.torchrun.plugins.torchrun.joining import join_as_control, join_as_member
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import Supervisor
from metaflow_extensions.torchrun.plugins.torchrun.transfer import Step, Transfer, size_text
from metaflow_extensions.torchrun.plugins.torchrun.value_store import DatastoreValues

DEADLINE_S = 30.0
KEY = {"region_name": "us-east-1", "aws_access_key_id": "id", "aws_secret_access_key": "key"}
AGENT = """#!{python} -IS
import os, pickle, sys, time
_, _, *_, folder = sys.argv
node = [arg for arg in sys.argv if arg.startswith("--node-rank=")][0].split("=")[1]
with open(os.path.join(folder, "started"), "a") as file:
    file.write("again ")
{code}
"""
RETURNS = """
with open(os.path.join(folder, "values", f"returned-{node}.pkl"), "wb") as file:
    pickle.dump("of rank " + node, file)
"""
RAISES = """
if node == "0":
    time.sleep(100)
with open(os.path.join(folder, "values", f"raised-{node}.pkl"), "wb") as file:
    pickle.dump({"exception": pickle.dumps(ValueError("loss is nan")), "text": "ValueError: loss is nan"}, file)
sys.exit(1)
"""


class Store:
    """A datastore whose answers wait for the test: each save or load takes a word from `answers`."""

    where = "the s3 datastore s3://bucket/flows"

    def __init__(self):
        self.data, self.answers, self.begun, self.last_error = {}, queue.Queue(), queue.Queue(), None

    def save(self, data):
        self.begun.put("save")
        if self.answers.get() == "fail":
            raise RuntimeError("SlowDown: reduce your request rate")
        self.data["key"] = data
        return "key"

    def load(self, keys):
        self.begun.put("load")
        if self.answers.get() == "fail":
            raise RuntimeError("no such bucket")
        for key in keys:
            yield key, self.data[key]

    def trouble(self):
        return self.last_error


class Book:
    """An address book in memory."""

    def __init__(self):
        self._addresses = queue.Queue()

    def publish(self, address, patience_s):
        self._addresses.put(address)

    def look_up(self, timeout_s, all_s, sleep):
        return self._addresses.get(timeout=timeout_s)


class Node(threading.Thread):
    """One node of a gang of two, and what came of its launch."""

    def __init__(self, number, book, store, agent, policy):
        super().__init__(daemon=True)
        self.number, self.book, self.store, self.agent, self.policy = number, book, store, agent, policy
        self.lines, self.result, self.error, self.seat = [], None, None, None
        self.ended, self.may_leave = threading.Event(), threading.Event()
        self.may_leave.set()
        self.start()

    def run(self):
        settings = parse_settings({**DEFAULTS, "grace_s": 1}, "train")
        emit = lambda event: self.lines.append(event.text)  # noqa: E731
        if self.number == 0:
            self.seat, _ = join_as_control(self.book, 2, "", settings, emit, True)
        else:
            self.seat, _ = join_as_member(self.book, 1, 2, settings, emit)
        try:
            with FunctionCall(print, None, None, True, self.store) as call:
                self.launch(call)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()
            self.may_leave.wait(DEADLINE_S)
            self.seat.leave(self.error)

    def launch(self, call):
        spec = LaunchSpec(*call.command, False, nproc=1, num_nodes=2, node_index=self.number, python=self.agent)
        supervisor = Supervisor(
            call.fit(spec),
            self.seat,
            "127.0.0.1",
            Machine(1),
            self.policy,
            1.0,
            30.0,
            {},
            lambda stream, text: None,
            call,
        )
        self.result = supervisor.run()
        self.starts = Path(call.folder, "started").read_text().split()

    def said(self, *words):
        return any(all(word in line for word in words) for line in self.lines)


@pytest.fixture
def gang(tmp_path, monkeypatch):
    """Return a function that starts a gang of two nodes; at the end no node of it may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # stacks of a hang stay
    nodes, stores = [], []

    def start(code=RETURNS, **policy):
        agent = tmp_path / "agent"
        agent.write_text(AGENT.format(python=sys.executable, code=code))
        agent.chmod(0o700)
        store, book = Store(), Book()
        stores.append(store)
        nodes.extend(Node(number, book, store, str(agent), LaunchPolicy(**policy)) for number in (0, 1))
        return store, *nodes

    yield start
    for node in nodes:
        node.join(DEADLINE_S)
        assert not node.is_alive()
    for store in stores:
        for _ in range(5):
            store.answers.put("go on")  # threads that were given up


def test_a_slow_store_is_told_and_is_neither_a_hang_nor_too_long_a_launch(gang, monkeypatch):
    monkeypatch.setattr(transfer, "REMIND_S", 0.2)
    store, control, member = gang(hang_timeout_s=1.0, timeout_s=1.5, max_restarts=2)
    assert store.begun.get(timeout=DEADLINE_S) == "save"
    store.last_error = "503 SlowDown"
    words = ["stores rank 1's value (", "(the datastore fails: 503 SlowDown), for ", " s so far"]
    eventually(lambda: member.said(*words), deadline_s=DEADLINE_S)
    assert not control.ended.wait(2.0), "longer than both limits"
    store.answers.put("go on")
    assert store.begun.get(timeout=DEADLINE_S) == "load"
    eventually(lambda: control.said("loads rank 1's value", "for "), deadline_s=DEADLINE_S)
    store.answers.put("go on")
    assert control.ended.wait(DEADLINE_S)
    assert member.ended.wait(DEADLINE_S)
    assert (control.error, member.error) == (None, None)
    assert list(control.result) == ["of rank 0", "of rank 1"]
    assert list(member.result) == ["of rank 1"]
    assert member.starts == control.starts == ["again"]


def test_a_value_that_can_not_be_stored_fails_the_launch_on_all_nodes_once(gang):
    store, *nodes = gang(max_restarts=2)
    store.answers.put("fail")
    for node in nodes:
        assert node.ended.wait(DEADLINE_S)
        assert type(node.error) is LaunchFailed
        assert node.error.cause["category"] == "store"
        words = str(node.error)
        assert "Rank 1 on node 1 (host " in words
        assert ") has ended well, but rank 1's value (" in words
        assert " could not be stored in the s3 datastore s3://bucket/flows after 0 s: RuntimeError: SlowDown" in words
    assert not nodes[0].said("restart 1 of")


def test_a_store_that_never_answers_fails_the_launch_when_its_time_is_up(gang, monkeypatch):
    monkeypatch.setattr(function_call, "patience_for", lambda size: 1.0)
    _, control, member = gang()
    assert control.ended.wait(DEADLINE_S)
    assert "could not be stored in the s3 datastore s3://bucket/flows after 1 s: it has not answered" in str(
        control.error
    )
    assert type(member.error) is LaunchFailed


def test_values_that_can_not_be_loaded_are_an_error_of_the_control_node(gang):
    store, control, member = gang()
    store.answers.put("go on")
    store.answers.put("fail")
    assert control.ended.wait(DEADLINE_S)
    assert type(control.error) is LaunchFailed
    assert "rank 1's value could not be loaded from the s3 datastore s3://bucket/flows" in str(control.error)
    assert "RuntimeError: no such bucket" in str(control.error)
    assert member.ended.wait(DEADLINE_S)


@pytest.mark.parametrize("how", ["terminated", "control lost", "abort"])
def test_a_node_that_stores_obeys_at_once(gang, how):
    store, control, member = gang()
    assert store.begun.get(timeout=DEADLINE_S) == "save"
    begun = time.monotonic()
    if how == "terminated":
        member.may_leave.clear()  # as a step that catches the error and goes on
        member.seat.inbox.put({"type": "terminated"})  # as the handler of SIGTERM does
    elif how == "abort":
        control.seat.inbox.put({"type": "terminated"})
    else:
        member.seat.deliver({"type": "control_lost", "reason": "its machine is gone"})
    assert member.ended.wait(DEADLINE_S)
    assert control.ended.wait(DEADLINE_S)
    assert time.monotonic() - begun < 5.0
    member.may_leave.set()
    assert isinstance(member.error, LaunchFailed if how == "control lost" else TorchrunPreempted)
    assert isinstance(control.error, LaunchFailed)


def test_what_was_raised_goes_the_same_way_but_delays_no_verdict(gang, monkeypatch):
    monkeypatch.setattr(function_call, "RAISED_PATIENCE_S", 1.0)
    store, control, member = gang(RAISES)
    assert store.begun.get(timeout=DEADLINE_S) == "save"
    for node in (control, member):
        assert node.ended.wait(DEADLINE_S)
        assert type(node.error) is LaunchFailed
        assert node.error.cause["node"] == 1
    assert not member.said("could not be stored")


def test_a_node_that_stores_does_not_hide_a_hang_of_another(gang):
    store, control, member = gang("if node == '0':\n    time.sleep(100)\n" + RETURNS, hang_timeout_s=1.0)
    assert store.begun.get(timeout=DEADLINE_S) == "save"
    for node in (control, member):
        assert node.ended.wait(DEADLINE_S)
        assert isinstance(node.error, LaunchHung)


def test_a_transfer_that_was_given_up_goes_no_further():
    taken, going = queue.Queue(), threading.Event()

    def first():
        taken.put("first")
        going.wait(DEADLINE_S)
        return {}

    steps = [Step("one", first, 10.0), Step("two", lambda: {"two": taken.put("second")}, 10.0)]
    upload = Transfer(Store(), "stores", steps)
    upload.start()
    assert taken.get(timeout=DEADLINE_S) == "first"
    upload.give_up()
    going.set()
    eventually(lambda: upload.over)
    assert taken.empty()
    assert not upload.results


ABANDONED = """
from concurrent.futures import ThreadPoolExecutor
import threading, time
from metaflow_extensions.torchrun.plugins.torchrun.transfer import Step, Transfer

class Store:
    where = "the s3 datastore"
    def trouble(self):
        return None

def save():  # as boto3 does it: in threads of a pool, which the interpreter waits for
    with ThreadPoolExecutor() as pool:
        pool.submit(begun.set)
        pool.submit(time.sleep, 1000).result()

begun = threading.Event()
upload = Transfer(Store(), "stores", [Step("a value", save, 1000.0)])
upload.start()
begun.wait()
upload.give_up()
"""


def test_a_transfer_that_was_given_up_holds_up_no_exit():
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ABANDONED], timeout=DEADLINE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begun < DEADLINE_S


class Busy(BaseHTTPRequestHandler):
    """An S3 that answers as it does when it has too much to do."""

    def do_PUT(self):
        body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_what_the_s3_client_meets_is_known_while_it_tries_again():
    store = DatastoreValues(SimpleNamespace(TYPE="s3", datastore_root="s3://bucket"))
    assert store.trouble() is None
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        client = boto3.client("s3", endpoint_url=url, config=Config(retries={"mode": "adaptive"}), **KEY)
        step = Step("a value", lambda: client.put_object(Bucket="b", Key="k", Body=b"v"), 100.0)
        upload = Transfer(store, "stores", [step])
        upload.start()
        words = "a value (the datastore fails: SlowDown: Please reduce your request rate.)"
        eventually(lambda: upload.what() == words, deadline_s=DEADLINE_S)
        server.shutdown()


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2.1e9, "2.1 GB"), (3e8, "300.0 MB")]
)
def test_sizes_are_for_people(size, text):
    assert size_text(size) == text
