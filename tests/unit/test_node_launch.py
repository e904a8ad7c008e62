"""What one node does in one launch: which message follows on what its agent says and what its gang decides."""

import json
import signal
import time

import pytest
from fake_node import NOBODY, FakeNode
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Failed,
)
from metaflow_extensions.torchrun.plugins.torchrun.node.agent_events import (
    AgentEnded,
    WorkerEnded,
)

STOP, CLOSE = ("stop", 30.0), ("close", 0.0)


@pytest.fixture
def node(tmp_path):
    """Return the control node of a fake gang; a test that makes others gives them folders of their own."""
    return FakeNode(tmp_path)


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
    node.agent_stderr(agent, f"a warning\n{REPORT}{stderr}")
    for event in events:
        agent.say(event)
    failed = node.expect(Failed)
    (failure,) = failed.failures
    cause = failure.cause
    assert (failed.generation, cause.kind, cause.rank, cause.exit_code) == (0, kind, rank, exit_code)
    assert words in cause.what
    ended = node.ends(agent, 1)
    assert (ended.ok, [each.cause for each in ended.failures]) == (False, [cause])
    (said,) = node.texts("worker_failed")
    assert (said.startswith(line), said.endswith("; stopping all nodes")) == (True, True)
    assert agent.orders == orders
    shown = "".join(node.output)
    # torchrun's own report is shown where nothing else explains the failure.
    is_only_hint = what in ("the agent itself", "a signal to the agent")
    assert ("a warning" in shown, REPORT.splitlines()[1] in shown) == (True, is_only_hint)
    assert cause.detail == (f"a warning\n{REPORT}{stderr}".rstrip() if is_only_hint else "")


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
