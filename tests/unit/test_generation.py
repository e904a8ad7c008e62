"""Which of one node's ends count as failures, and since when."""

import json
import signal
import time
from datetime import datetime, timedelta

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.generation import Generation
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import LaunchSpec

SPEC = LaunchSpec("/flow/train.py", (), False, nproc=3, num_nodes=2, node_index=1, python="python3")
TERMINATED = -signal.SIGTERM


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


class Node:
    """The second node of a gang, whose ranks are 3, 4 and 5; its clock's origin was a minute ago."""

    def __init__(self, folder):
        self.folder = folder
        self.origin = time.monotonic() - 60
        self.agent_stderr = write(folder / "agent.stderr", "")
        logs = str(self.agent_stderr)
        self.generation = Generation(SPEC, "host-1", 0, str(folder), [], None, None, logs, oom_kills_before=None)

    def raised(self, local_rank, exception, at):
        record = {"exception": exception, "traceback": f"Traceback\n{exception}", "at": self.origin + at}
        write(self.folder / "run_x" / "attempt_0" / str(local_rank) / "exception.json", json.dumps(record))

    def ended(self, local_rank, status, at, stopped=False):
        event = {"local_rank": local_rank, "rank": 3 + local_rank, "pid": 100 + local_rank, "status": status}
        self.generation.note_end({**event, "stopped": stopped, "t": self.origin + at})

    def reaped(self, local_rank, at):
        self.generation.reaped[local_rank] = 100 + local_rank
        self.generation.ended_at[local_rank] = self.origin + at

    def stop(self, at):
        self.generation.stopped_at = self.origin + at

    def torchrun_stops(self, *local_ranks, at=None):
        """Have torchrun say that it stops some; its clock may be of another zone."""
        when = datetime.now() - timedelta(hours=1 if at is None else 0, seconds=60 - (at or 0))
        head = f"W{when:%m%d %H:%M:%S.%f} 77 torch/api.py:1] Sending process"
        lines = [f"{head} {100 + rank} closing signal SIGTERM" for rank in local_ranks]
        write(self.agent_stderr, "\n".join(lines))

    def causes(self):
        """Return rank, exception and moment of each failure, the earliest first."""
        now = time.monotonic() - self.origin
        wire = list(self.generation.causes(final=True))
        return [(each["cause"]["rank"], each["cause"]["exception"], round(now - each["age_s"], 1)) for each in wire]


def test_what_a_stopped_rank_raised_then_does_not_hide_the_rank_that_failed(node):
    """It obeyed, in its own way; that its peer's connection broke is the only cause there is."""
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.ended(0, 1, at=1.5)
    node.stop(at=1.6)
    node.raised(1, "RuntimeError: interrupted while saving", at=1.7)
    node.ended(1, 1, at=1.8, stopped=True)
    node.raised(2, "OSError: bye", at=1.9)
    node.ended(2, TERMINATED, at=1.9, stopped=True)
    assert node.causes() == [(3, "ConnectionResetError: by peer", 1.0)]


def test_a_rank_that_failed_before_it_was_stopped_counts_since_it_failed(node):
    """The origin was slow to exit; its peer, which only saw it gone, was first to end."""
    node.raised(0, "ValueError: nan", at=1.0)
    node.raised(1, "ConnectionResetError: by peer", at=1.2)
    node.ended(1, 1, at=1.3)
    node.stop(at=1.4)
    node.ended(0, TERMINATED, at=2.0, stopped=True)
    assert node.causes() == [(3, "ValueError: nan", 1.0), (4, "ConnectionResetError: by peer", 1.2)]


def test_an_end_without_record_counts_when_it_came(node):
    node.ended(0, -9, at=1.0)
    node.raised(1, "KeyError: 1", at=0.5)
    node.ended(1, 1, at=2.0)
    assert node.causes() == [(4, "KeyError: 1", 0.5), (3, None, 1.0)]


def test_torchruns_own_signal_is_no_cause_and_comes_after_the_first_failure(node):
    node.torchrun_stops(1, 2)
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.ended(0, 1, at=1.1)
    node.raised(1, "RuntimeError: told to stop", at=1.3)
    node.ended(1, 1, at=1.4)
    node.raised(2, "ValueError: nan", at=0.9)
    node.ended(2, TERMINATED, at=1.4)
    assert node.causes() == [(5, "ValueError: nan", 0.9), (3, "ConnectionResetError: by peer", 1.0)]


def test_torchrun_may_have_seen_a_failure_long_before_we_did(node):
    """On a busy machine."""
    node.raised(0, "RuntimeError: told to stop", at=1.3)
    node.torchrun_stops(0, at=1.2)
    node.ended(1, -9, at=2.0)
    node.ended(0, 1, at=2.0)
    assert node.causes() == [(4, None, 2.0)]


def test_a_failure_that_torchrun_alone_has_seen_ends_what_others_can_have_failed_of(node):
    node.torchrun_stops(1)
    node.raised(0, "ConnectionResetError: by peer", at=1.0)
    node.reaped(0, at=1.1)
    node.raised(1, "RuntimeError: told to stop", at=1.3)
    node.ended(1, 1, at=1.4)
    assert node.generation.failed_unseen() == 0
    node.generation.reaped_failed = True
    assert node.causes() == [(3, "ConnectionResetError: by peer", 1.0)]


@pytest.mark.parametrize("code", [-15, -9, 143])
def test_a_gang_that_was_stopped_has_no_cause_of_its_own(node, code):
    node.stop(at=1.0)
    for local_rank in range(3):
        node.ended(local_rank, code, at=1.2, stopped=True)
    assert node.causes() == []
