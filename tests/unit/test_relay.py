"""Lines of other nodes in the control node's log: whole and in order, or counted where they are missing; nobody waits."""

import asyncio
import os
import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit_s
from loops import InLoop, Loop
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.limits import LATE_S
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Ended, Join
from metaflow_extensions.torchrun.plugins.torchrun.machine.streams import unread_bytes
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import output, relay
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.connection import LENGTH, decode, encode
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.control_side import ControlSide
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.member_side import MemberSide
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.output import Output
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.relay import LineSender

HOST = "127.0.0.1"
LINE = re.compile(r"\[rank (\d)\] (\d+) x*")
GAP = re.compile(
    r"\[torchrun node (\d)\] (\d+) lines? (?:is|are) left out here, .*`python flow.py torchrun logs` has them"
)


def into(found):
    """Return a way to send messages, which puts them into a list as they arrive."""
    return lambda message: found.append(decode(encode(message)[LENGTH.size :]))


# --- a member's end -------------------------------------------------------------------------------

TEXTS = st.tuples(
    st.sampled_from(["stdout", "stderr"]),
    st.integers(1, 1500),
    st.integers(0, 90),
    st.sampled_from("x\x00🙂\u2028\x0c"),
)


@settings(deadline=None)
@given(st.lists(TEXTS | st.none(), max_size=20))
def test_every_line_is_sent_whole_and_in_order_or_is_counted_where_it_is_missing(texts):
    found, written = [], []

    async def send():
        sender = LineSender(into(found), lambda: True, 2)
        for each in texts:
            if each is None:
                sender.send_all()
                continue
            stream, count, width, character = each
            lines = [f"{len(written) + number} {character * width}\n" for number in range(count)]
            written.extend((stream, line) for line in lines)
            sender.add(stream, "".join(lines))
        sender.send_all()

    asyncio.run(send())
    at = 0
    for lines in found:
        at += lines.left_out
        sent = [(stream, f"{line}\n") for stream, text in lines.texts for line in text[:-1].split("\n")]
        assert sent == written[at : at + len(sent)]
        at += len(sent)
    assert at == len(written)


def test_a_large_gang_does_not_flood_its_control_node():
    found, pauses, sizes = [], {}, {}

    async def send():
        for nodes in (2, 16, 200, 1000, 4000):
            sender = LineSender(into(found), lambda: True, nodes)
            sender.add("stdout", ("x" * 99 + "\n") * 10_000)
            sender.send_all()
            pauses[nodes], sizes[nodes] = sender.pause_s, len(found[-1].texts[0][1])

    asyncio.run(send())
    assert (pauses[16], sizes[16]) == (0.5, 131_000)
    assert all(nodes / pause <= 400 for nodes, pause in pauses.items())  # messages a second
    assert all(nodes * size <= 32 * 1024**2 for nodes, size in sizes.items()), "as at the end of a launch"
    assert sizes[4000] > 8000, "the end of a traceback"
    assert max(pauses.values()) <= LATE_S, "else `torchrun logs` takes a line for that of the next node with its rank"


# --- both ends, over sockets ----------------------------------------------------------------------


class Log:
    """The control node's stdout and stderr: a pipe that is read from `read` on."""

    def __init__(self, monkeypatch):
        self._reading, self._writing = os.pipe()
        monkeypatch.setattr(output, "_FDS", dict.fromkeys(("stdout", "stderr"), self._writing))
        self._text, self._reader = bytearray(), threading.Thread(target=self._read)

    def read(self):
        if self._reader.ident is None:
            self._reader.start()

    def _read(self):
        while data := os.read(self._reading, 1_000_000):
            self._text += data

    def lines(self, loop, output):
        """Return what was read as whole lines, when all is written."""
        self.read()
        assert loop.call(output.settle, limit_s(30))
        eventually(lambda: not unread_bytes(self._writing))
        eventually(lambda: self.text[-1:] == "\n")
        return self.text[:-1].split("\n")

    @property
    def text(self):
        return self._text.decode()

    def close(self):
        self.read()
        os.close(self._writing)
        self._reader.join()
        os.close(self._reading)


@pytest.fixture
def log(monkeypatch):
    """The log, in the place of this process's streams."""
    log = Log(monkeypatch)
    yield log
    log.close()


class Gang:
    """A control node and a member, each in a loop of its own, as in the supervisors."""

    def __init__(self, heartbeat_s):
        self.lost = []
        rules = {"started_timeout_s": 60.0, "grace_s": 1.0}
        ignore = lambda *told: None  # noqa: E731
        self.output = Output(ignore)
        self.control = InLoop(Loop(), lambda: ControlSide(ignore, self.output, 2, heartbeat_s, "a token", rules))
        self.member = InLoop(Loop(), lambda: MemberSide(self._hear, self.output, 1, 2, heartbeat_s))
        port = self.control.listen(None, HOST)
        self.control.send(Join(0, "host-0"))
        self.member.connect([HOST], port, "a token", 10.0)

    def _hear(self, what, *rest):
        self.lost += [rest] if what == "lost" else []

    def is_whole(self):
        """Return whether nobody has lost anybody."""
        return not self.lost and set(self.control.states()) == {"HERE"}

    def close(self):
        for side in (self.member, self.control):
            side.close(0.0)
            side.in_loop.call(self.output.settle, limit_s(30))
            side.in_loop.stop()


def test_a_flood_that_nobody_reads_holds_up_no_worker_and_no_heartbeat(log, monkeypatch, request):
    """A million lines: much more arrives than the control node keeps."""
    monkeypatch.setattr(relay, "_PAUSE_S", 0.005)
    silence_s = limit_s(0.5)
    gang = Gang(silence_s)
    request.addfinalizer(gang.close)
    member = gang.member
    count, slowest_s, begun = 1_000_000, 0.0, time.monotonic()
    for begin in range(0, count, 500):
        text = "".join([f"[rank 1] {number} {'x' * 80}\n" for number in range(begin, begin + 500)])
        asked = time.monotonic()
        member.lines("stdout", text)
        slowest_s = max(slowest_s, time.monotonic() - asked)
    assert slowest_s < limit_s(1.0)
    time.sleep(max(0.0, begun + 2 * silence_s - time.monotonic()))  # so that silence is noticed
    assert gang.is_whole()
    log.lines(gang.control.in_loop, gang.output)  # all that was kept
    member.lines("stdout", f"[rank 1] {count} x\n")
    member.send(Ended(0, True))
    eventually(lambda: f"] {count} x\n" in log.text, "the last line")
    expected = missing = 0
    for line in log.lines(gang.control.in_loop, gang.output):
        if gap := GAP.match(line):
            missing += int(gap[2])
            expected += int(gap[2])
            assert gap[1] == "1"
        else:
            assert LINE.fullmatch(line), "torn"
            assert int(LINE.match(line)[2]) == expected
            expected += 1
    assert expected == count + 1
    assert missing > count / 2
    assert len(log.text) < 6 * 1024**2, "so much was kept, at most"
    assert gang.is_whole()
