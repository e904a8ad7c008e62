"""What a function's ranks leave for other nodes: a phase of its own, with real nodes, a real channel and a slow store.

The nodes are threads of this process. Their agents are small programs that leave values as torchrun's workers would.
"""

import queue
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from botocore.config import Config
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.border.value_store import DatastoreValues
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed, TorchrunPreempted
from metaflow_extensions.torchrun.plugins.torchrun.gang.join import join_as_control, join_as_member
from metaflow_extensions.torchrun.plugins.torchrun.gang.member import Interruption
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.launch import function as function_call
from metaflow_extensions.torchrun.plugins.torchrun.launch import transfer
from metaflow_extensions.torchrun.plugins.torchrun.launch.function import FunctionCall
from metaflow_extensions.torchrun.plugins.torchrun.launch.spec import LaunchSpec
from metaflow_extensions.torchrun.plugins.torchrun.launch.transfer import Step, Transfer, size_text
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.node.plan import Plan
from metaflow_extensions.torchrun.plugins.torchrun.node.supervisor import Supervisor
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings

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


class Registry:
    """A registry in memory."""

    def __init__(self):
        self._records = queue.Queue()

    def publish(self, record, patience_s):
        self._records.put(record)

    def look_up(self, timeout_s, all_s, sleep):
        return self._records.get(timeout=timeout_s)


class Node(threading.Thread):
    """One node of a gang of two, and what came of its launch."""

    def __init__(self, number, registry, store, agent, policy):
        super().__init__(daemon=True)
        self.number, self.registry, self.store, self.agent, self.policy = number, registry, store, agent, policy
        self.lines, self.result, self.error, self.member = [], None, None, None
        self.ended = threading.Event()
        self.start()

    def run(self):
        settings = parse_settings({**DEFAULTS, "grace_s": 1}, "train")
        emit = lambda event: self.lines.append(event.text)  # noqa: E731
        if self.number == 0:
            self.member, _ = join_as_control(self.registry, 2, "", settings, emit, True)
        else:
            self.member, _ = join_as_member(self.registry, 1, 2, settings, emit)
        try:
            with closing(FunctionCall(print, None, None, True, self.store)) as call:
                self.launch(call)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()
            self.member.leave(self.error)

    def launch(self, call):
        spec = LaunchSpec(
            function_call.FUNCTION_WORKER,
            (call.folder,),
            False,
            nproc=1,
            num_nodes=2,
            node_index=self.number,
            python=self.agent,
        )
        plan = Plan(
            call.fit(spec), "127.0.0.1", Machine(1), lambda stream, text: True, self.policy, grace_s=1.0, call=call
        )
        self.result = Supervisor(plan, self.member).run()
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
        store, registry = Store(), Registry()
        stores.append(store)
        nodes.extend(Node(number, registry, store, str(agent), LaunchPolicy(**policy)) for number in (0, 1))
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
    # Longer than both limits.
    words = ["stores rank 1's value (", "(the datastore fails: 503 SlowDown), for 2 s so far"]
    eventually(lambda: member.said(*words), deadline_s=DEADLINE_S)
    assert not control.ended.is_set()
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


@pytest.mark.parametrize("how", ["control lost", "abort"])
def test_a_node_that_stores_obeys_at_once(gang, how):
    store, control, member = gang()
    assert store.begun.get(timeout=DEADLINE_S) == "save"
    begun = time.monotonic()
    if how == "abort":
        control.member.inbox.put(Interruption.MUST_END)
    else:
        member.member.lose_control("its machine is gone")
    assert member.ended.wait(DEADLINE_S)
    assert control.ended.wait(DEADLINE_S)
    assert time.monotonic() - begun < 5.0
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
from metaflow_extensions.torchrun.plugins.torchrun.launch.transfer import Step, Transfer

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
