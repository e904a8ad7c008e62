"""The alarm of the step's @timeout: who hears of it, and that Metaflow has it back."""

import os
import signal
import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine import pods
from metaflow_extensions.torchrun.plugins.torchrun.task import step_timeout
from metaflow_extensions.torchrun.plugins.torchrun.task.step_timeout import alarm_text, time_limit


class Decorator:
    """What Metaflow's decorator has, as far as it matters here."""

    name, secs, alarms = "timeout", 90, 0

    def handle(self, number, frame):
        self.alarms += 1


@pytest.fixture(autouse=True)
def first_time():
    """Forget the first time that another test has asked."""
    step_timeout._began_at.cache_clear()


@pytest.fixture
def metaflows():
    decorator = Decorator()
    before = signal.signal(signal.SIGALRM, decorator.handle)
    yield decorator
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def in_pod(monkeypatch):
    """Have this be a pod of this age, in seconds."""

    def in_pod(age_s):
        monkeypatch.setenv("METAFLOW_RUNTIME_ENVIRONMENT", "kubernetes")
        monkeypatch.setattr(step_timeout, "age_s", lambda: age_s)

    yield in_pod
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize(
    ("timeout_s", "age_s", "grace_s", "left_s"),
    [(3600, 100, 30, 3600 - 100 - 45), (60, 20, 30, 60 - 20 - 15), (3600, 9999, 30, 3600 - 45)],
    ids=["long", "short", "not its age"],
)
def test_the_gang_ends_before_its_pod_does_whose_clock_began_earlier(in_pod, timeout_s, age_s, grace_s, left_s):
    assert time_limit(timeout_s, 7.0, grace_s) == (
        7.0 + timeout_s,
        f"longer than the step's @timeout of {timeout_s} s allows",
    )
    in_pod(age_s)
    now = time.monotonic()
    limit = time_limit(timeout_s, now, grace_s)
    assert limit.ends_at - now == pytest.approx(left_s, abs=1)
    assert ("100 s before the gang's; the last 45 s are left" in limit.text) is (age_s == 100)


@pytest.mark.parametrize("age_s", [10, 0], ids=["known", "unknown"])
def test_the_alarm_of_another_node_comes_before_its_pod_ends_however_often_it_is_set(
    in_pod, metaflows, age_s, monkeypatch
):
    in_pod(age_s)
    for late_s in (0.0, 7.0):
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda late_s=late_s, now=now: now() + late_s)
        assert alarm_text(5.0) is not None
        expected = 90 - age_s - 20 - (0.0 if age_s else late_s)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(expected, abs=1)


def test_a_pod_is_as_old_as_its_first_process_or_as_what_was_made_with_it(tmp_path):
    here = pods.age_s(first_process=os.getpid())
    assert 0 < here < 3600
    assert pods.age_s(first_process=os.getppid()) >= here
    assert pods.age_s(str(tmp_path), 2**22 + 1) == 0, "a file of the image's says nothing"
    assert pods.age_s("/proc", 2**22 + 1) > 0
