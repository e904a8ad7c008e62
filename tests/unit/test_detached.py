"""Processes of ours that are nobody's children here."""

import os
import signal

from metaflow_extensions.torchrun.plugins.torchrun.machine.detached import Detached
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import children


def test_what_it_says_first_is_never_taken_for_its_number():
    """Whoever the scheduler lets run first."""
    for _ in range(60):
        one = Detached("os.write(1, b'hello\\n')", [], os.environ)
        assert os.read(one.output.fileno(), 100) == b"hello\n"
        one.output.close()
        assert one.wait(10.0)


def test_it_is_no_child_and_hears_signals():
    one = Detached("import signal; os.write(1, b'!'); signal.pause()", [], os.environ)
    assert os.read(one.output.fileno(), 1) == b"!"
    assert one.pid not in children(os.getpid())
    one.send_signal(signal.SIGKILL)
    assert one.wait(10.0)
    one.output.close()
