"""Run one control node and thousands of members over real sockets, and tell how long they wait and what it costs.

Every member is the real `MemberSide`; those of one process share a thread. See README.md.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import queue
import random
import resource
import secrets
import socket
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
from report import Report, parser

from metaflow_extensions.torchrun.plugins.torchrun import registry
from metaflow_extensions.torchrun.plugins.torchrun.gang import messages, policy
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import control_side, member_side
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.usage_observer import SAMPLES_PER_S, STEP_S

HOST = "127.0.0.1"
NO_OUTPUT: Any = None  # nobody writes lines here
HEARTBEAT_S = 30.0  # its default
WAIT_S = 300.0
RANKS = 8
ENDS_S = 0.2  # that the workers of a member take to end when they are told to
_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n' + "    step(batch)\n" * 100
READY = messages.Ready(0, RANKS, "d" * 64, {"torch": "2.13.0", "python": "3.11.7"})
POLICY = policy.LaunchPolicy(timeout_s=3600.0, restart_on=frozenset())
USED = messages.Report(
    "usage",
    0,
    0,
    {
        "of": "container",
        "values": {"cpus": 7.512, "memory_mib": 15230.125, "gpu_percent": 97.125, "gpu_memory_mib": 61234.5}
        | {"received_kib_s": 12.25, "sent_kib_s": 10.5, "output_bytes_s": 812.5},
        "limits": {"cpus": 8.0, "memory_mib": 65536.0, "gpus": 8.0, "gpu_memory_mib": 655360.0},
    },
)
# What is measured: its name, its unit, and the targets by the number of members.
FIGURES = {
    "join": ("all have joined after", "s", {}),
    "go": ("all have heard go after", "s", {1000: 0.5, 4000: 2.0}),
    "stop": ("all have heard stop after", "s", {1000: 0.3, 4000: 1.0}),
    "verdict": ("all have heard the verdict after", "s", {1000: 1.0, 4000: 3.0}),
    "steady": ("CPU of the control node while nothing happens", "%", {1000: 2.0}),
    "cpu joined": ("its CPU until all have joined", "s", {}),
    "cpu end": ("its CPU from the failure to the last verdict", "s", {}),
    "memory": ("its memory", "MB", {1000: 50.0, 4000: 100.0}),
}


def report(node: int, exception: str, age_s: float, count: int = 1) -> tuple[Failure, ...]:
    """Return what a node says of its failed ranks."""
    ranks = ((node * RANKS + rank, rank) for rank in range(count))
    return tuple(
        Failure(Cause("exception", node, f"host-{node}", rank, local, 1, f"{exception} {local}", _TRACE), age_s)
        for rank, local in ranks
    )


def loop_thread() -> asyncio.AbstractEventLoop:
    """Return a loop that runs in a thread of its own, as a supervisor's main thread runs it."""
    loop = asyncio.SelectorEventLoop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


# --- a process of members ---------------------------------------------------------------------------


class Channel(member_side.MemberSide):
    """A member's connection, whose messages come to the member."""

    def __init__(self, member: Member) -> None:
        super().__init__(lambda *told: None, NO_OUTPUT, member.node, 2, HEARTBEAT_S)
        self.deliver, self.lose_control = member.deliver, member.lose_control  # type: ignore[method-assign]


class Member:
    """One member: joins, is ready, tells what it uses, fails when told to stop, and notes when it heard what."""

    def __init__(self, node: int, step_s: float) -> None:
        self.node, self.step_s = node, step_s
        self.heard: dict[str, float] = {}
        self.error: str | None = None
        self.channel = Channel(self)

    def deliver(self, message: messages.Message) -> None:
        """Take a message."""
        self.heard.setdefault(type(message).__name__.lower(), time.monotonic())
        if isinstance(message, messages.Go):
            asyncio.get_running_loop().call_later(random.random() * self.step_s, self.tell_usage)
        elif isinstance(message, messages.Stop):
            asyncio.get_running_loop().call_later(ENDS_S, self.end)
        elif isinstance(message, messages.Verdict):
            self.channel.send(messages.Leave("left"))

    def tell_usage(self) -> None:
        """Tell what this node uses, as each does while its workers run."""
        if "stop" not in self.heard:
            self.channel.send(USED)
            asyncio.get_running_loop().call_later(self.step_s, self.tell_usage)

    def end(self) -> None:
        """Tell how the workers have ended."""
        lost_peer = report(self.node, "ConnectionError: Connection reset by peer", 0.1, RANKS)
        self.channel.send(messages.Ended(0, False, 0, lost_peer))

    def lose_control(self, reason: str) -> None:
        """Note that the control node is not heard any more."""
        self.heard.setdefault("control_lost", time.monotonic())

    def has_heard(self, kind: str) -> bool:
        """Tell whether it has heard something, or nothing more will come."""
        return self.error is not None or not self.heard.keys().isdisjoint({kind, "farewell", "control_lost"})

    async def join(self, port: int, token: str, begin_at: float) -> None:
        """Connect at the same moment as all others."""
        await asyncio.sleep(begin_at - time.monotonic())
        deadline = time.monotonic() + WAIT_S
        for pause_s in registry.growing_pauses():  # as `join` does it, but in the loop that all share
            try:
                await self.channel.connect([HOST], port, token, deadline - time.monotonic())
                return
            except Exception as error:
                if not isinstance(error, OSError) or time.monotonic() > deadline:
                    self.error = repr(error)
                    return
            await asyncio.sleep(pause_s)


def await_order(control: Connection, said: object) -> float:
    """Say how far this process is, and return when to go on."""
    control.send(said)
    begin_at: float = control.recv()
    return begin_at


def await_members(members: list[Member], kind: str) -> None:
    """Wait until all have heard something."""
    deadline = time.monotonic() + WAIT_S
    while not all(member.has_heard(kind) for member in members) and time.monotonic() < deadline:
        time.sleep(0.05)


def run_members(control: Connection, port: int, token: str, count: int, first: int, last: int) -> None:
    """Run members until all have heard their verdict, and say when they heard what."""
    set_soft_limit(None)
    loop = loop_thread()

    async def make() -> list[Member]:
        return [Member(node, max(STEP_S, (count + 1) / SAMPLES_PER_S)) for node in range(first, last)]

    members = asyncio.run_coroutine_threadsafe(make(), loop).result()
    begin_at = await_order(control, "ready")
    for member in members:
        asyncio.run_coroutine_threadsafe(member.join(port, token, begin_at), loop)
    await_members(members, "answer")
    begin_at = await_order(control, "joined")
    for member in members:
        loop.call_soon_threadsafe(loop.call_at, begin_at, member.channel.send, READY)
    await_members(members, "farewell")
    control.send([(member.node, member.heard, member.error) for member in members])


def run_unauthenticated(control: Connection, port: int, count: int) -> None:
    """Connect, say nothing, and come again when hung up on; until this process is ended."""

    async def one() -> None:
        while True:
            try:
                reader, _ = await asyncio.open_connection(HOST, port)
                while await reader.read(1000):
                    pass
            except OSError:
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    set_soft_limit(None)
    time.sleep(await_order(control, "ready") - time.monotonic())
    asyncio.run(all_of_them())


# --- the control node -------------------------------------------------------------------------------


class Part(NamedTuple):
    """A process of members, or of unauthenticated connections."""

    process: SpawnProcess
    link: Connection

    @classmethod
    def start(cls, target: Any, *args: object) -> Part:
        """Start it; it ends with this process."""
        spawn = multiprocessing.get_context("spawn")
        link, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        return cls(process, link)


def order(parts: list[Part], said: str) -> float:
    """Have all parts go on at the same moment, once they are so far; return when."""
    for part in parts:
        assert part.link.recv() == said
    begin_at = time.monotonic() + 0.2
    for part in parts:
        part.link.send(begin_at)
    return begin_at


class Control:
    """The control node of one gang, with what it uses."""

    def __init__(self, count: int) -> None:
        self._inbox: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()
        self.token = secrets.token_hex()
        self._loop = loop_thread()

        async def listen() -> int:
            about = count + 1, HEARTBEAT_S, self.token, {"started_timeout_s": WAIT_S}
            self.channel = control_side.ControlSide(lambda *told: None, NO_OUTPUT, *about)
            self.channel.deliver = self._inbox.put  # type: ignore[method-assign]
            return await self.channel.listen(None, HOST)

        self.port = asyncio.run_coroutine_threadsafe(listen(), self._loop).result()
        self.send(messages.Join(0, socket.gethostname()))
        time.sleep(0.2)
        Path("/proc/self/clear_refs").write_text("5")  # begins anew with the most memory (proc(5))
        self._memory_before = resident_mb("VmRSS")

    def send(self, message: messages.Message) -> None:
        """Hand the gang a message of the control node."""
        self._loop.call_soon_threadsafe(self.channel.send, message)

    def expect(self, kind: type[Any], parts: list[Part]) -> Any:
        """Return the next message of a kind."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and not any(part.process.exitcode for part in parts):
            try:
                message = self._inbox.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(message, kind):
                return message
            if isinstance(message, messages.Abort):
                sys.exit(f"the gang broke: {message.error.message[:500]}")
        return sys.exit(f"waited in vain for {kind.__name__}")

    def fail(self, parts: list[Part]) -> None:
        """Tell of a failure, and wait for the verdict."""
        first = report(0, "ValueError: the first", 0.5)
        self.send(messages.Failed(0, 0, first))
        self.send(messages.Ended(0, False, 0, first))
        verdict = self.expect(messages.Verdict, parts)
        assert "ValueError: the first" in verdict.error.message, verdict.error.message[:500]

    def close(self) -> float:
        """Return the most memory that it has used for the gang, in MB, and end it."""
        memory = resident_mb("VmHWM") - self._memory_before
        self.send(messages.Leave("left"))
        asyncio.run_coroutine_threadsafe(self.channel.close(10.0), self._loop).result()
        return memory


def resident_mb(which: str) -> float:
    """Return this process's memory: now (``VmRSS``), or the most since it was last forgotten (``VmHWM``)."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"\n{which}:")[2].split()[0]) * 1024 / 1e6


def run_gang(link: Connection, count: int, others: int, processes: int, steady_s: float, files: int) -> None:
    """Run a gang of `count` members from its first join to its last verdict; say the figures."""
    set_soft_limit(files)
    control, cpu_s = Control(count), [time.process_time()]
    edges = [1 + count * i // processes for i in range(processes + 1)]
    some = (control.port, control.token, count)
    parts = [Part.start(run_members, *some, *ends) for ends in itertools.pairwise(edges)]
    crowd = [Part.start(run_unauthenticated, control.port, others)] if others else []
    begin_at = order([*parts, *crowd], "ready")
    ready_at = order(parts, "joined")
    cpu_s.append(time.process_time())
    control.send(replace(READY, policy=POLICY))
    control.expect(messages.Go, parts)
    time.sleep(2.0)  # until the last has heard it, too
    steady_at, cpu_steady = time.monotonic(), time.process_time()
    time.sleep(steady_s)
    failed_at = time.monotonic()
    cpu_s.append(time.process_time())
    control.fail(parts)
    seen = [member for part in parts for member in part.link.recv()]
    cpu_s.append(time.process_time())
    memory = control.close()
    lost = [member for member in seen if member[2] or "verdict" not in member[1]]
    if lost or len(seen) != count:
        sys.exit(f"{len(lost)} members of {len(seen)} are lost, for example {lost[:1]}")
    begins = {"answer": begin_at, "go": ready_at, "stop": failed_at, "verdict": failed_at}
    waits = {kind: max(heard[kind] for _, heard, _ in seen) - begin for kind, begin in begins.items()}
    steady = 100 * (cpu_s[2] - cpu_steady) / (failed_at - steady_at)
    cpu = {"steady": steady, "cpu joined": cpu_s[1] - cpu_s[0], "cpu end": cpu_s[3] - cpu_s[2]}
    link.send({"join": waits.pop("answer"), **waits, **cpu, "memory": memory})


def set_soft_limit(files: int | None) -> None:
    """Set how many files this process may open; None is as many as it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if files is None else files, hard))


def measure(members: int, *more: float) -> dict[str, float]:
    """Run a gang in a process of its own, whose memory is that of no other."""
    spawn = multiprocessing.get_context("spawn")
    link, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run_gang, args=(theirs, members, *more))
    process.start()
    theirs.close()
    try:
        figures: dict[str, float] = link.recv()
    except EOFError:
        sys.exit(f"a gang with {members} members did not come to its end")
    process.join()
    return figures


def main() -> None:
    """Run gangs of some sizes, each some times."""
    # `processes`: how many share the members; `files`: the control node's soft limit of open files.
    more: dict[str, Any] = {"unauthenticated": 0, "processes": 2, "steady": 12.0, "files": 1024}
    given = parser(__doc__, rounds=3, members=[10, 100, 1000, 4000], **more).parse_args()
    told = Report("thousands of members")
    for members in given.members:
        runs = [measure(members, *(getattr(given, name) for name in more)) for _ in range(given.rounds)]
        for name, (what, unit, targets) in FIGURES.items():
            values = [figures[name] for figures in runs]
            told.add(f"{members} members: {what}", values, unit, targets.get(members))
    told.finish(given.json)


if __name__ == "__main__":
    main()
