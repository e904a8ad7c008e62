"""The step's @timeout: when it ends a gang."""

import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import pods
from metaflow_extensions.torchrun.plugins.torchrun.task import step_timeout
from metaflow_extensions.torchrun.plugins.torchrun.task.step_timeout import time_limit


@pytest.mark.parametrize(
    ("timeout_s", "age_s", "grace_s", "left_s"),
    [(3600, 100, 30, 3600 - 100 - 45), (60, 20, 30, 60 - 20 - 15), (3600, 9999, 30, 3600 - 45)],
    ids=["long", "short", "not its age"],
)
def test_the_gang_ends_before_its_pod_does_whose_clock_began_earlier(timeout_s, age_s, grace_s, left_s, monkeypatch):
    text = f"longer than the step's @timeout of {timeout_s} s allows"
    assert time_limit(timeout_s, 7.0, grace_s) == {"deadline": 7.0 + timeout_s, "longer": text}
    monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
    monkeypatch.setattr(step_timeout, "age_s", lambda: age_s)
    now = time.monotonic()
    limit = time_limit(timeout_s, now, grace_s)
    assert limit["deadline"] - now == pytest.approx(left_s, abs=1)
    assert ("100 s before the gang's; the last 45 s are left" in limit["longer"]) is (age_s == 100)


def test_a_pod_is_as_old_as_what_was_made_with_it(tmp_path):
    assert pods.age_s(str(tmp_path)) == 0, "a file of the image's says nothing"
    assert pods.age_s("/proc") > 0
