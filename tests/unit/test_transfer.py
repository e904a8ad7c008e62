"""Values on their way to a store that is slow, fails or is given up."""

import subprocess
import sys
import threading

from limits import limit_s
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import Transfer

DEADLINE_S = limit_s(HANG_S)


def test_who_waits_too_long_hears_so():
    go_on = threading.Event()
    loading = Transfer(lambda begin: go_on.wait(), patience_s=0.0)
    loading.await_end()
    assert "it has not answered, or is too slow" in loading.problem()
    go_on.set()


def test_what_was_given_up_begins_nothing_more():
    go_on, begun = threading.Event(), []

    def do(begin):
        go_on.wait()
        begin("the next")
        begun.append("the next")

    storing = Transfer(do)
    storing.give_up()
    go_on.set()
    storing.await_end()
    assert (storing.hangs, begun) == (False, [])


ENDS_DURING_EXIT = """
import atexit, time
atexit.register(time.sleep, 0.5)  # what is registered later is called before
from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import Transfer
job = Transfer(lambda begin: time.sleep(0.2))
job.give_up()
"""


def test_a_transfer_that_was_given_up_holds_up_no_exit():
    done = subprocess.run([sys.executable, "-c", ENDS_DURING_EXIT], timeout=DEADLINE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
