"""Work in the background is done when it is wanted, and its thread is there only meanwhile."""

import subprocess
import sys
import threading
from itertools import repeat

import pytest
from limits import limit_s
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.channel import background
from metaflow_extensions.torchrun.plugins.torchrun.channel.background import Work
from metaflow_extensions.torchrun.plugins.torchrun.machine import native


def test_a_work_that_is_wanted_while_it_is_done_is_done_once_more_and_says_then_when_it_is_due():
    free, begun, told = threading.Semaphore(0), [], []

    def do():
        begun.append(1)
        assert free.acquire(timeout=limit_s(HANG_S))
        return len(begun), 9.0

    work = Work(do, told.append)
    work.begin()
    eventually(lambda: begun == [1])
    for _ in range(3):
        work.begin()
    assert not work.settle(0.01)
    free.release(2)
    assert work.settle(limit_s(HANG_S))
    eventually(lambda: told == [(2, 9.0)])
    assert len(begun) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_work_that_raises_is_due_again():
    told = []

    def do():
        if not told:
            work.begin()
        raise MemoryError

    work = Work(do, told.append)
    work.begin()
    eventually(lambda: told == [background._AGAIN] * 2)
    assert work.settle(limit_s(HANG_S)), "what was wanted meanwhile is done"


def test_a_work_that_finds_no_thread_is_due_again(monkeypatch):
    done, told = [], []
    work = Work(lambda: done.append(1) or (1.0, 1.0), told.append)

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(native, "start_new_thread", refuse)
        work.begin()
    assert (done, told, work.settle(1.0)) == ([], [background._AGAIN], True)
    work.begin()
    eventually(lambda: told[1:] == [(1.0, 1.0)])


def test_threads_that_begin_a_work_at_the_same_moment_do_it_one_after_the_other():
    lock, done, told = threading.Lock(), [], []

    def do():
        assert lock.acquire(blocking=False), "two at a time"
        done.append(1)
        lock.release()
        return 1.0, 1.0

    work = Work(do, told.append)
    threads = [threading.Thread(target=lambda: [work.begin() for _ in repeat(None, 200)]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(limit_s(HANG_S))
    assert work.settle(limit_s(HANG_S))
    assert 0 < len(done) <= 800
    assert set(told) <= {(1.0, 1.0)}


REPLACED = """
import metaflow  # it imports our modules, so it must come before them
import _thread, select, signal, socket, threading, time
from types import SimpleNamespace
from metaflow_extensions.torchrun.plugins.torchrun.channel.background import Work
from metaflow_extensions.torchrun.plugins.torchrun.channel.link import LinkEnd
from metaflow_extensions.torchrun.plugins.torchrun.gang.wakeup import Wakeup
from metaflow_extensions.torchrun.plugins.torchrun.machine import native

wakeup = Wakeup(SimpleNamespace(link=None, raise_news=lambda: woken.append(True)))
wakeup.set_handlers()
sleep = time.sleep
for module, name in ((select, "poll"), (time, "sleep"), (_thread, "start_new_thread"), (_thread, "allocate_lock")):
    setattr(module, name, None)
threading.Lock = threading.Event = None
threading.main_thread = lambda: SimpleNamespace(ident=1)  # the number of a greenlet, which is no thread's

own, other = native.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
heard, woken, done = [], [], []
one, two = LinkEnd(own, heard.append, lambda: False), LinkEnd(other, heard.append, lambda: False)
two.send("x")
assert one.wait(10.0) and heard == [["x"]]

def do():
    wakeup.wake_again()
    done.append(True)
    return 1.0, 1.0

work = Work(do, lambda pauses: None)
work.begin()
assert work.settle(10.0) and done and woken
flag = native.Flag()
assert not flag.wait(0.01)
flag.set()
assert flag.wait(0.01)
print("well")
"""


def test_what_waits_and_starts_threads_is_the_kernels_although_the_modules_have_something_else():
    """As after gevent.monkey.patch_all(). In a process of its own: the threads of this one need what is replaced."""
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=limit_s(HANG_S))
    assert done.stdout.endswith("well\n"), done.stderr
