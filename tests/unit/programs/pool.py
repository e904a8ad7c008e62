"""A step with a gang around it that uses pools of processes: tells, as JSON, how long that took and what the gang heard."""

import json
import multiprocessing
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import metaflow  # noqa: F401 - it imports our modules, so it must come before them

from metaflow_extensions.torchrun.plugins.torchrun.task.member import Member

ROUNDS = 15
took = []


def use_pool():
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    took.append(time.monotonic() - begun)


sent = []
link = SimpleNamespace(send=lambda *frame: sent.append(frame), read=list, ours=nullcontext, waiter=None, end=None)
member = Member(0, 2, link)
for _ in range(ROUNDS):
    if sys.argv[1] == "main":
        use_pool()
    else:
        thread = threading.Thread(target=use_pool)
        thread.start()
        thread.join()
print(json.dumps({"longest_s": max(took), "sent": sent}))
