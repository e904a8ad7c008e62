"""The alarm of the step's @timeout: who hears of it, and that Metaflow has it back."""

import signal
from types import SimpleNamespace

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchTimeout
from metaflow_extensions.torchrun.plugins.torchrun.task.step_timeout import StepTimeout


class Decorator:
    """What Metaflow's decorator has, as far as it matters here."""

    name, secs, alarms = "timeout", 90, 0

    def handle(self, number, frame):
        self.alarms += 1


@pytest.fixture
def metaflows():
    decorator = Decorator()
    before = signal.signal(signal.SIGALRM, decorator.handle)
    yield decorator
    signal.signal(signal.SIGALRM, before)


def test_the_gang_hears_of_the_alarm_and_a_node_that_waits_for_it_raises(metaflows):
    timeout, heard = StepTimeout(), []
    with pytest.raises(LaunchTimeout, match=r"waited for its gang .*@timeout of 90 s"):
        signal.raise_signal(signal.SIGALRM)
    timeout.tell(SimpleNamespace(time_out=heard.append))
    signal.raise_signal(signal.SIGALRM)
    assert "@timeout of 90 s" in "".join(heard)
    timeout.end()
    signal.raise_signal(signal.SIGALRM)
    assert (len(heard), metaflows.alarms) == (1, 1)


def test_an_alarm_of_somebody_else_is_left_alone(metaflows):
    metaflows.name = "mine"
    timeout = StepTimeout()
    signal.raise_signal(signal.SIGALRM)
    timeout.end()
    assert metaflows.alarms == 1
