"""Values on their way to a store that is slow, fails or is given up."""

import subprocess
import sys
import threading

import pytest
from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import Step, Transfer, TransferFailed

DEADLINE_S = limit_s(HANG_S)


def test_who_waits_too_long_hears_for_what_and_why():
    go_on = threading.Event()
    loading = Transfer("the s3 datastore", "loads", [Step("rank 1's value", go_on.wait, 0.0)])
    said = r"rank 1's value could not be loaded from the s3 datastore .*has not answered"
    with pytest.raises(TransferFailed, match=said):
        loading.wait(print)
    go_on.set()


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
