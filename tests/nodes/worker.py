"""A worker without torch: it writes numbered lines and does what it is told.

After each line it notes in a ledger, which is no log, how many it has written: so much must be in its node's log.
``WORKER_DO`` says what it does from its begin, as ``RANK:ACTION`` or ``RANK@GENERATION:ACTION`` with commas
between; ``*`` is every rank or generation. Later orders come as files ``do-RUN_ID-RANK``; ``finish`` ends all.
"""

import json
import os
import signal
import sys
import time

RANK = os.environ["RANK"]
RUN_ID = "-".join(os.environ["TORCHELASTIC_RUN_ID"].split("-")[:2])  # without the gang's name
OUT = os.environ["CHAOS_OUT"]
NAME = f"{RUN_ID}-{RANK}"
LINE_S = 0.01
LAST_WORDS = 10
DEADLINE_S = 1200.0


def note(name, what):
    path = os.path.join(OUT, name)
    with open(path + ".part", "w") as file:
        json.dump(what, file)
    os.replace(path + ".part", path)


def strike(fault):
    """Note when the fault happens, then do it."""
    note(f"struck-{NAME}", time.monotonic())
    fault()


def detach(levels=2):
    """Leave a grandchild in a session of its own that ignores SIGTERM."""
    for _ in range(levels):
        if os.fork() > 0:
            if levels == 2:
                os.wait()
                return
            os._exit(0)
        levels -= 1
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"grandchild-{NAME}", os.getpid())
    time.sleep(300)
    os._exit(0)


def fail_late_when_told(delay_s):
    """Take `delay_s` seconds over SIGTERM, and fail then with an exception of one's own."""

    def handler(*_):
        time.sleep(delay_s)
        raise RuntimeError("too late to be the cause")

    signal.signal(signal.SIGTERM, handler)


def fill_disk():
    """Write ten times as much as the small disk for temporary files takes."""
    sys.stdout.write(("x" * 1023 + "\n") * 4000)
    sys.stdout.flush()


def flood(mebibytes):
    """Write so much in lines, and note after each MiB how many that were."""
    for number in range(mebibytes):
        sys.stdout.write(f"{'y' * 1023}\n" * 1024)
        sys.stdout.flush()
        note(f"flooded-{NAME}", number + 1)


def be_quiet():
    """Do nothing until all ends."""
    while not os.path.exists(os.path.join(OUT, "finish")):
        time.sleep(0.1)


def write_without_newline(size):
    """Write `size` bytes in one line that never ends, and die: numbers, so that no missing piece can hide."""
    sys.stdout.write("".join(f"{number:07d}," for number in range(size // 8)))
    sys.stdout.flush()
    strike(lambda: os.kill(os.getpid(), signal.SIGKILL))


def shout(size):
    """Fail with a message of `size` characters that take four bytes each, or twelve where they are escaped."""
    note(f"struck-{NAME}", time.monotonic())
    raise RuntimeError("🙂" * size)


ACTIONS = {
    "rest": lambda: time.sleep(DEADLINE_S),
    "exit": lambda code="3": strike(lambda: os._exit(int(code))),
    "end": lambda: sys.exit(0),
    "fail-late": lambda delay_s: fail_late_when_told(float(delay_s)),
    "detach": detach,
    "fill-disk": fill_disk,
    "flood": lambda mebibytes: flood(int(mebibytes)),
    "be-quiet": be_quiet,
    "shout": lambda size: shout(int(size)),
    "no-newline": lambda size: write_without_newline(int(size)),
}


def act(order):
    verb, *arguments = order.split()
    ACTIONS[verb](*arguments)


def begin():
    generation = RUN_ID.rpartition("-")[2]
    for entry in filter(None, os.environ.get("WORKER_DO", "").split(",")):
        who, _, order = entry.partition(":")
        rank, _, when = who.partition("@")
        if rank in (RANK, "*") and when in (generation, "*", ""):
            act(order)


class Told:
    """Whether SIGTERM has come; last words follow it, and then the end that it would have made at once."""

    def __init__(self):
        self.now = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_):
        self.now = True

    @staticmethod
    def obey():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


class Ledger:
    """Counts the lines that were written, where no log can lose it."""

    def __init__(self):
        self._file = os.open(os.path.join(OUT, f"ledger-{NAME}"), os.O_CREAT | os.O_WRONLY)
        self._count = 0

    def write_line(self):
        self._count += 1
        os.write(1, f"line {NAME} {self._count:06d} of a log that nobody may lose\n".encode())
        os.pwrite(self._file, b"%08d" % self._count, 0)


def talk(told):
    """Write lines until told otherwise."""
    order, finish = os.path.join(OUT, f"do-{NAME}"), os.path.join(OUT, "finish")
    ledger, deadline = Ledger(), time.monotonic() + DEADLINE_S
    while not os.path.exists(finish) and time.monotonic() < deadline:
        ledger.write_line()
        if os.path.exists(order):
            with open(order) as file:
                text = file.read()
            os.remove(order)
            act(text)
        time.sleep(LINE_S)
        if told.now:
            break
    for _ in range(LAST_WORDS):
        ledger.write_line()
    if told.now:
        told.obey()


def note_self(**more):
    """Leave what this worker is, and which network it is told to use."""
    network = {name: os.environ.get(name) for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    restart, node = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["CHAOS_NODE"])
    own = {"pid": os.getpid(), "agent": os.getppid(), "node": node, "restart": restart}
    note(f"worker-{NAME}", {**own, **network, **more})


if __name__ == "__main__":
    note_self()
    told = Told()
    begin()
    talk(told)
