"""What gangs do on AWS Batch alone; see test_backends.py for the rest.

There a node's end ends nothing, except node 0's, which ends all.
"""

from __future__ import annotations

import pytest
from backends import Queue
from remote_flows import check_said

pytestmark = pytest.mark.batch


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        pytest.param("after:1:raise", "ValueError: step code failed after run", id="after-run"),
        pytest.param("unstorable:1", "this artifact can't be stored", id="unstorable"),
        pytest.param("unstorable:0", "UnpicklableArtifactException", id="unstorable-control"),
    ],
)
def test_a_node_that_fails_after_its_last_launch_fails_the_run(run_remote, queue, hook, expected):
    """By itself, Metaflow 2.19 reports success when a worker node fails after its artifacts were set."""
    flow = run_remote(expect=1, HOOK=hook, **queue.on())
    check_said(flow, expected)
    assert f"node {hook.split(':')[1]} (host" in flow.text.lower()
