"""Values on their way to a store that is slow, fails or is given up."""

import queue
import subprocess
import sys

import pytest
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import Step, Transfer, TransferFailed

DEADLINE_S = limit_s(HANG_S)


@pytest.fixture
def going():
    """Return a queue; each thing in it ends a transfer that `loading` has made, as its step's work."""
    going = queue.Queue()
    yield going
    going.put(dict)


def loading(going, patience_s):
    return Transfer("the s3 datastore", "loads", [Step("rank 1's value", lambda: going.get()(), patience_s)])


def test_who_waits_too_long_hears_for_what_and_why(going):
    with pytest.raises(
        TransferFailed, match=r"rank 1's value could not be loaded from the s3 datastore .*has not answered"
    ):
        loading(going, 0.0).wait(print)


ENDS_DURING_EXIT = """
import atexit, time
atexit.register(time.sleep, 0.5)  # what is registered later is called before
from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import Step, Transfer
job = Transfer("the s3 datastore", "stores", [Step("a value", lambda: time.sleep(0.2), 1000.0)])
job.give_up()
"""


def test_a_transfer_that_was_given_up_holds_up_no_exit():
    done = subprocess.run([sys.executable, "-c", ENDS_DURING_EXIT], timeout=DEADLINE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
