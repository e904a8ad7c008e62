"""A task's link without a supervisor, whose part the test takes; and a member with one."""

import json
import os
import queue
import signal
import threading
import time
from collections import deque
from contextlib import nullcontext

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import from_wire, to_wire
from metaflow_extensions.torchrun.plugins.torchrun.task.member import Member


class FakeLink:
    """What the task sends is in `sent`, its messages to the control node in `messages`."""

    def __init__(self):
        self.sent, self.messages = queue.Queue(), queue.Queue()
        self.own_files = {"stdout": None, "stderr": None}
        self.end = self.waiter = self.last_words = self.handle = self.turn = None
        self.is_closed = False
        self.awaited = []  # for how long its end was awaited
        self._come = deque()

    def send(self, *frame):
        what, *rest = frame = json.loads(json.dumps(frame))
        if what == "send":
            self.messages.put(from_wire(rest[0]))
        else:
            self.sent.put(frame)

    def says(self, *frame):
        """Say something to the task."""
        self.handle(json.loads(json.dumps(frame)))

    def deliver(self, message):
        """Hand the task a message of the control node."""
        self.says("deliver", to_wire(message))

    def comes(self, *frame):
        """Say something that the step's own code must hear of."""
        self._come.append(frame)
        os.kill(os.getpid(), signal.SIGURG)

    def wait(self, is_over, timeout_s):
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            self.turn()
            if is_over():
                return True
            if self.end is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.002)

    def wake(self):
        self.send("echo")

    def ours(self):
        return nullcontext()

    def read(self):
        while self._come:
            self.says(*self._come.popleft())

    def settle(self, patience_s=None):
        return True

    def await_end(self, patience_s):
        self.awaited.append(patience_s)

    def close(self):
        self.is_closed = True


def in_thread(do):
    """Call something in another thread, where it sets no handlers of signals; return what it returns."""
    found = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()
    thread.join()
    return found[0]


def member_of(link, node=1, num_nodes=2):
    """Return a member that leaves the signals of this process alone."""
    return in_thread(lambda: Member(node, num_nodes, link))
