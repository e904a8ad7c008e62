"""What one node does in one launch: which message follows on what its agent says and what its gang decides."""

import functools
import json
import queue
import signal
import threading
import time
from dataclasses import replace

import pytest
from fake_node import DEADLINE_S, ERROR, NOBODY, FakeNode
from unit_helpers import eventually, write

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Ended,
    Failed,
    Store,
    Stored,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.launch import transfer
from metaflow_extensions.torchrun.plugins.torchrun.launch.services import InTask, Service, Services, ToStore
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import (
    AgentEnded,
    End,
    WorkerEnded,
)
from metaflow_extensions.torchrun.plugins.torchrun.node.endings import MustEnd

STOP, CLOSE = ("stop", 30.0), ("close", 0.0)


@pytest.fixture
def node(tmp_path):
    """Return the control node of a fake gang; a test that makes others gives them folders of their own."""
    return FakeNode(tmp_path)


# --- a launch that ends well ------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "policy"), [(0, LaunchPolicy()), (1, None)], ids=["control", "other"])
def test_a_launch_from_ready_to_its_result(number, policy, tmp_path):
    """Only the control node says how it is to be run, and logs its begin and its end."""
    node = FakeNode(tmp_path, number)
    ready = node.launch()
    assert (ready.launch, ready.nproc, ready.policy) == (0, 2, policy)
    agent = node.go(port=29517)
    assert "--rdzv-endpoint=127.0.0.1:29517" in " ".join(agent.command)
    ended, result = node.ends_well(agent)
    codes = dict.fromkeys((2 * number, 2 * number + 1), 0)
    assert (ended.ok, ended.failures, ended.exit_codes, ended.stores) == (True, (), codes, False)
    assert (result.launch, result.world_size, result.restarts, result.exit_codes) == (0, 4, [], codes)
    assert [(event.text, event.is_detail) for event in node.events if event.kind == "command"] == [
        (f"runs: {result.command}", True)
    ]
    assert [kind for kind, _ in node.said if kind in ("facts", "ended")] == ["facts", "ended"] * (number == 0)
    assert agent.orders == ["start", CLOSE]


def test_the_output_is_shown_with_labels_and_leaves_no_files(node, tmp_path):
    agent = node.running()
    node.worker_writes(agent, "stdout", "hello\n")
    node.agent_stderr(agent, "a warning\n")
    node.all_end_well(agent)
    assert node.report("wrote") == {}
    assert node.expect(Ended).ok
    node.verdict()
    assert sorted(node.output) == ["[rank 1] hello\n", "[torchrun node 0] a warning\n"]
    assert not list(tmp_path.glob("torchrun-*"))


# --- ranks that train alone -------------------------------------------------------------------------


class MeansIt(Service):
    """What wants each rank's own value."""

    may_train_alone = True


@pytest.mark.parametrize(
    ("about", "who", "alone"),
    [
        ({}, [0, 1], True),
        ({}, [0], False),
        ({"services": Services({"some": Service()})}, [0, 1], True),
        ({"services": Services({"some": MeansIt()})}, [0, 1], False),
        ({"spec": {"nproc": 1, "num_nodes": 1}}, [0], False),
    ],
    ids=["all", "one of two", "with a service", "a service means it", "a single rank"],
)
def test_the_gang_is_told_if_all_ranks_of_a_node_have_trained_alone(tmp_path, about, who, alone):
    node = FakeNode(tmp_path, **about)
    agent = node.running()
    for local_rank in who:
        node.trained_alone(agent, local_rank)
    ended, _ = node.ends_well(agent)
    assert (ended.ok, ended.alone) == (True, alone)


# --- failures of this node --------------------------------------------------------------------------


def ended(local_rank, status, stopped=False):
    return WorkerEnded(local_rank, local_rank, NOBODY + local_rank, status, stopped, 0.0)


REPORT = "Traceback (most recent call last):\nChildFailedError\n"  # of torchrun, when a worker has failed
GOT_SIGNAL = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"
BY_US, BY_ITSELF = ["start", STOP, CLOSE], ["start", CLOSE]

# What torchrun has printed after its report, what happens to it; kind, rank, exit code and words of the cause, how
# the log's line begins, and who stops the rest.
HERE = {
    "a worker": (
        "",
        [ended(1, 3), ended(0, -15, True)],
        ("exit", 1, 3, "exited with code 3"),
        "a worker exited",
        BY_US,
    ),
    "the agent itself": (
        "RuntimeError: the store is gone\n",
        [AgentEnded(1, 0.0)],
        ("agent_ended", None, 1, "its torchrun agent exited with code 1"),
        "the torchrun agent exited with code 1;",
        BY_ITSELF,
    ),
    "a signal to the agent": (
        GOT_SIGNAL,
        [AgentEnded(1, 0.0)],
        ("agent_ended", None, 1, "got SIGTERM from outside of the gang"),
        "the torchrun agent exited with code 1;",
        BY_ITSELF,
    ),
}


@pytest.mark.parametrize("what", HERE)
def test_a_failure_here_is_reported_once_and_stops_the_node(what, node):
    stderr, events, (kind, rank, exit_code, words), line, orders = HERE[what]
    agent = node.running()
    for local_rank in (0, 1):
        node.trained_alone(agent, local_rank)  # which counts for those alone that end well
    node.agent_stderr(agent, f"a warning\n{REPORT}{stderr}")
    for event in events:
        agent.say(event)
    failed = node.expect(Failed)
    (failure,) = failed.failures
    cause = failure.cause
    assert (failed.generation, cause.kind, cause.rank, cause.exit_code) == (0, kind, rank, exit_code)
    assert words in cause.what
    ended = node.ends(agent, 1)
    assert (ended.ok, ended.alone, [each.cause for each in ended.failures]) == (False, False, [cause])
    (said,) = node.texts("worker_failed")
    assert (said.startswith(line), said.endswith("; stopping all nodes")) == (True, True)
    assert agent.orders == orders
    shown = "".join(node.output)
    # torchrun's own report is shown where nothing else explains the failure.
    is_only_hint = what in ("the agent itself", "a signal to the agent")
    assert ("a warning" in shown, REPORT.splitlines()[1] in shown) == (True, is_only_hint)
    assert cause.detail == (f"a warning\n{REPORT}{stderr}".rstrip() if is_only_hint else "")


def test_of_two_failures_at_once_the_first_is_told_and_the_second_is_known_at_the_end(node):
    agent = node.running()
    now = time.monotonic()
    node.worker_ended(agent, 0, 1, at=now)
    node.worker_ended(agent, 1, -signal.SIGSEGV, at=now - 5)
    agent.say(AgentEnded(1, now))
    assert [each.cause.rank for each in node.expect(Failed).failures] == [0]
    ended = node.ends(agent, 1)
    assert [each.cause.rank for each in ended.failures] == [1], "it was the earlier one"
    assert ended.exit_codes == {0: 1, 1: -signal.SIGSEGV}
    assert agent.orders == BY_US, "it is stopped once"


def test_the_ranks_that_fail_in_the_same_way_are_told_with_the_first(node):
    agent = node.running()
    now = time.monotonic()
    for local_rank, at in ((0, now), (1, now - 1.0)):
        record = {"exception": "ValueError: nan", "traceback": "", "at": at}
        write(node.worker_writes(agent, "stderr", "", local_rank) / "exception.json", json.dumps(record))
    node.worker_ended(agent, 0, 1, at=now)
    assert [each.ranks for each in node.expect(Failed).failures] == [(0,)]
    node.worker_ended(agent, 1, -signal.SIGTERM, stopped=True)  # it was killed after it had raised
    (failure,) = node.ends(agent).failures
    assert (failure.cause.rank, failure.ranks) == (1, (1, 0))


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        ((None, "could not be started: no such file"), "agent", "its torchrun agent could not be started: no such"),
        ((None,), "agent", "its torchrun agent vanished"),
        ((-9,), "agent", "its torchrun agent was killed by SIGKILL"),
    ],
    ids=["not started", "gone", "killed"],
)
def test_an_end_that_came_before_any_worker(end, kind, words, node):
    node.launch()
    ended = node.ends(node.go(), *end)
    cause = ended.failures[0].cause
    assert (ended.ok, cause.kind, cause.exit_code) == (False, kind, end[0])
    assert cause.exception.startswith(words)


@pytest.mark.parametrize(
    ("folder", "spec", "words"),
    [
        ("file", {}, "[Errno 20] Not a directory"),
        ("temporary", {"env": 5}, "TypeError: 'int' object"),
        ("temporary", {}, "RuntimeError: can't start new thread"),
    ],
    ids=["folder", "environment", "start"],
)
def test_what_keeps_an_agent_from_starting_is_told_and_leaves_no_files(folder, spec, words, tmp_path):
    (tmp_path / "temporary").mkdir()
    write(tmp_path / "file", "")
    node = FakeNode(tmp_path / folder, spec=spec)

    def no_threads(*_):
        raise RuntimeError("can't start new thread")

    async def close(*_):
        pass

    node.new_agent = lambda *args: type("Stuck", (), {"start": no_threads, "close": close})()
    node.launch()
    node.say_go()
    cause = node.expect(Ended).failures[0].cause
    assert cause.kind == "agent"
    assert cause.exception.startswith(f"its torchrun agent could not be started: {words}")
    assert node.texts("worker_failed") == [f"{cause.exception}; stopping all nodes"]
    node.verdict(ERROR)
    assert list((tmp_path / "temporary").iterdir()) == []


# --- what features store at the end -------------------------------------------------------------------


class Files(Service):
    """Stores what node 1 has: of both ranks, and after a failure of the first.

    Its datastore waits for the test's words; the word "fail" is an error.
    """

    folder, stores, where = "/folder of a service", True, "the s3 datastore s3://bucket"

    def __init__(self):
        self.words, self.last_error = queue.Queue(), None
        self.saving = threading.Semaphore(0)  # released whenever a value is to be saved
        self.generations, self.fails = 0, False

    def trouble(self):
        return self.last_error

    def begin(self, spec):
        self.generations += 1

    def to_store(self, error, within_s):
        self.within_s = within_s
        return Left(self, [2, 3] if error is None else [2]) if self.stores else None

    def result(self, told, say):
        if self.fails:
            raise transfer.TransferFailed("rank 2's value could not be loaded")
        return {"values": told, "metrics": {"generations": self.generations}}

    def failed(self, error, told):
        error.outputs = told or None


class Left(ToStore):
    """Something of each of some ranks."""

    def __init__(self, files, ranks):
        self.files, self.ranks, self.keys = files, ranks, {}

    def steps(self):
        for rank in self.ranks:
            yield transfer.Step(f"rank {rank}'s value", functools.partial(self.save, rank), transfer.PATIENCE_S, rank)

    def save(self, rank):
        self.files.saving.release()
        if self.files.words.get(timeout=DEADLINE_S) == "fail":
            raise RuntimeError("SlowDown")
        self.keys[str(rank)] = f"key {rank}"

    def told(self):
        return dict(self.keys) or None

    def lines(self, problem, seconds):
        return [f"stored {len(self.keys)}, {problem}"]


@pytest.fixture
def service():
    service = Files()
    yield service
    for _ in range(4):
        service.words.put("fail")  # whoever was given up


@pytest.fixture
def with_service(tmp_path, service):
    return FakeNode(tmp_path, number=1, services=Services({"files": service}), store=service)


@pytest.fixture
def storing(with_service, service):
    """Return a member whose ranks have ended well; it stores the first of their values and waits for the store."""
    node = with_service
    node.all_end_well(node.running())
    assert node.expect(Ended).stores
    node.seat.deliver(Store(0, 0))
    assert node.report("storing") == {"what": "rank 2's value"}
    assert service.saving.acquire(timeout=DEADLINE_S)
    return node


def stored_of(node):
    """Return what was told of the service, and *stored*."""
    told = []
    while not isinstance(message := node.next_message(), Stored):
        told += [message] if isinstance(message, messages.Report) and message.kind != "storing" else []
    return [(each.kind, each.data) for each in told], message


@pytest.mark.parametrize("news", ["stop", "restart", "interruption"])
def test_an_upload_is_given_up_for_what_is_more_urgent(news, storing, service):
    if news == "interruption":
        storing.interrupt(MustEnd("its machine goes"))
        assert isinstance(storing.outcome(), errors.TorchrunPreempted)
        assert (storing.expect(Failed).given_up, storing.expect(Ended).generation) == (True, None)
    elif news == "stop":
        storing.stop()
        storing.verdict(ERROR)
    else:
        storing.stop()
        agent = storing.go(generation=1)
    for _ in range(2):
        service.words.put("go on")
    eventually(lambda: "torchrun-values" not in {thread.name for thread in threading.enumerate()})
    assert service.words.qsize() == 1, "the second value is not begun"
    if news == "restart":  # now there is news of the upload as well
        agent.say(End(1))
        assert storing.expect(Ended).generation == 1
        storing.verdict(ERROR)
    else:
        assert storing.nothing_more_is_sent()


@pytest.mark.parametrize(("stores", "word"), [(True, "go on"), (True, "fail"), (False, "")])
def test_what_is_left_of_a_failed_launch_is_stored_and_its_loss_is_no_failure(stores, word, with_service, service):
    service.stores = stores
    with_service.plan = replace(with_service.plan, stores=stores)
    agent = with_service.running()
    agent.say(End(1))
    assert with_service.expect(Ended).stores is stores
    service.words.put(word)
    with_service.seat.deliver(Store(0, 3, ERROR, 60.0))  # of a generation that was to come
    told, stored = stored_of(with_service)
    assert (stored.generation, stored.failures, service.within_s) == (3, (), 60.0)
    assert told == ([("files", {"2": "key 2"})] if word == "go on" else [])
    error = errors.LaunchFailed(ERROR.message, ERROR.cause)
    assert with_service.verdict(error, features={"files": {"2": "key"}}) is error
    assert error.outputs == {"2": "key"}


def test_what_can_not_even_be_prepared_for_the_store_does_not_hide_why_the_launch_has_failed(with_service, service):
    def fail(*_):
        raise FileNotFoundError("a value's file is gone")

    service.to_store = fail
    agent = with_service.running()
    agent.say(End(1))
    with_service.expect(Ended)
    with_service.seat.deliver(Store(0, 0, ERROR, 60.0))
    assert with_service.expect(Stored).failures == ()
    assert with_service.verdict(ERROR) is ERROR


def test_a_result_that_can_not_be_loaded_is_a_failure_of_a_launch_that_had_ended_well(tmp_path, service):
    service.fails, service.stores = True, False
    node = FakeNode(tmp_path, services=Services({"files": service}))
    _, error = node.ends_well(node.running(), features={"files": {"2": "key"}})
    assert error.cause["category"] == "store"
    assert "had ended well on all nodes" in str(error)
    assert error.outputs == {"2": "key"}


class Gives(InTask):
    """Gives a service that counts how often it was closed, or refuses."""

    def __init__(self, refuses=False):
        self.refuses, self.closed = refuses, []

    def service(self, call):
        if self.refuses:
            raise errors.TorchrunError("not so")
        service = Service()
        service.close = lambda: self.closed.append(1)
        return service


def test_services_are_closed_at_the_end_and_where_another_is_refused():
    one, other = Gives(), Gives()
    with Services.of({"one": one, "none": InTask()}, None):
        assert one.closed == []
    with pytest.raises(errors.TorchrunError, match="not so"):
        Services.of({"other": other, "refuses": Gives(refuses=True)}, None)
    assert (one.closed, other.closed) == ([1], [1])


# --- how a launch becomes an agent ------------------------------------------------------------------
