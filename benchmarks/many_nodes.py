"""Run one control node and thousands of members over real sockets, and tell how long they wait and what it costs.

Every member is the real `MemberChannel`; those of one process share a thread. See README.md.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import random
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
from report import Report, parser

from metaflow_extensions.torchrun.plugins.torchrun.channel import member_channel
from metaflow_extensions.torchrun.plugins.torchrun.channel.connection import new_token
from metaflow_extensions.torchrun.plugins.torchrun.channel.control_channel import ControlChannel
from metaflow_extensions.torchrun.plugins.torchrun.channel.loop_thread import LoopThread
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy, growing_pauses
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import (
    Abort,
    Ended,
    Failed,
    Go,
    Join,
    Leave,
    Message,
    Ready,
    Stop,
    Usage,
    Verdict,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.gang.usage import step_s
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port

HOST = "127.0.0.1"
HEARTBEAT_S = 30.0  # its default
WAIT_S = 300.0
RANKS = 8
ENDS_S = 0.2  # that the workers of a member take to end when they are told to
_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n' + "    step(batch)\n" * 100
READY = Ready(0, RANKS, "d" * 64, {"torch": "2.13.0", "python": "3.11.7"})
POLICY = LaunchPolicy(timeout_s=3600.0, retry_on=frozenset())
USED = Usage(
    "container",
    {"cpus": 7.512, "memory_mib": 15230.125, "gpu_percent": 97.125, "gpu_memory_mib": 61234.5, "received_kib_s": 12.25}
    | {"sent_kib_s": 10.5, "output_bytes_s": 812.5, "output_lines_s": 8.125},
    {"cpus": 8.0, "memory_mib": 65536.0, "gpus": 8.0, "gpu_memory_mib": 655360.0},
)
# By the number of members: the last has heard *go*, *stop*, the verdict (s); CPU while nothing happens (%); memory (MB).
TARGETS = {1000: (0.5, 0.3, 1.0, 2.0, 50.0), 4000: (2.0, 1.0, 3.0, None, 100.0)}


def report(node: int, exception: str, age_s: float, count: int = 1) -> tuple[Failure, ...]:
    """Return what a node says of its failed ranks."""
    return tuple(
        Failure(
            Cause("exception", node, f"host-{node}", node * RANKS + rank, rank, 1, f"{exception} {rank}", _TRACE), age_s
        )
        for rank in range(count)
    )


# --- a process of members ---------------------------------------------------------------------------


class Member:
    """One member: joins, is ready, tells what it uses, fails when told to stop, and notes when it heard what."""

    def __init__(self, node: int, step_s: float) -> None:
        self.node, self.step_s = node, step_s
        self.heard: dict[str, float] = {}
        self.error: str | None = None
        self.channel = member_channel.MemberChannel(node, self.deliver, self.lose_control, HEARTBEAT_S)

    def deliver(self, message: Message) -> None:
        """Take a message, in the channel's thread."""
        self.heard.setdefault(type(message).__name__.lower(), time.monotonic())
        if isinstance(message, Go):
            asyncio.get_running_loop().call_later(random.random() * self.step_s, self.tell_usage)
        elif isinstance(message, Stop):
            asyncio.get_running_loop().call_later(ENDS_S, self.end)
        elif isinstance(message, Verdict):
            self.channel.send(Leave())

    def tell_usage(self) -> None:
        """Tell what this node uses, as each does while its workers run."""
        if "stop" not in self.heard:
            self.channel.send(USED)
            asyncio.get_running_loop().call_later(self.step_s, self.tell_usage)

    def end(self) -> None:
        """Tell how the workers have ended."""
        lost_peer = report(self.node, "ConnectionError: Connection reset by peer", 0.1, RANKS)
        self.channel.send(Ended(0, False, 0, lost_peer))

    def lose_control(self, reason: str) -> None:
        """Note that the control node is not heard any more, in the channel's thread."""
        self.heard.setdefault("control_lost", time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or "ack" in self.heard or "control_lost" in self.heard

    async def join(self, port: int, token: str, begin_at: float) -> None:
        """Connect at the same moment as all others."""
        await asyncio.sleep(begin_at - time.monotonic())
        deadline = time.monotonic() + WAIT_S
        for pause_s in growing_pauses():  # as `join` does it, but in the thread that all share
            try:
                await self.channel._connect([HOST], port, token, deadline - time.monotonic())
                return
            except Exception as error:
                if not isinstance(error, OSError) or time.monotonic() > deadline:
                    self.error = repr(error)
                    return
            await asyncio.sleep(pause_s)


def await_order(said: str = "ready") -> float:
    """Say how far this process is, and return when to go on."""
    print(said, flush=True)
    return float(sys.stdin.readline())


def await_members(members: list[Member], kind: str) -> None:
    """Wait until all have heard something."""
    deadline = time.monotonic() + WAIT_S
    while not all(kind in member.heard or member.is_over for member in members) and time.monotonic() < deadline:
        time.sleep(0.05)


def run_members(first: int, last: int, count: int, port: int, token: str) -> None:
    """Run members until all have heard their verdict, and print when they heard what."""
    shared = LoopThread("members", print)
    member_channel.LoopThread = lambda *_: shared  # type: ignore[assignment,misc]  # one thread for all
    members = [Member(node, step_s(count + 1)) for node in range(first, last)]
    begin_at = await_order()
    for member in members:
        asyncio.run_coroutine_threadsafe(member.join(port, token, begin_at), shared.loop)
    await_members(members, "welcome")
    begin_at = await_order("joined")
    for member in members:
        shared.post(shared.loop.call_at, begin_at, member.channel._send, READY)
    await_members(members, "ack")
    print(json.dumps([{"node": m.node, "heard": m.heard, "error": m.error} for m in members]))


# --- unauthenticated connections -----------------------------------------------------------------------------------


def unauthenticated(count: int, port: int) -> None:
    """Connect, say nothing, and come again when hung up on; until stdin closes."""

    async def one() -> None:
        while True:
            try:
                reader, _ = await asyncio.open_connection(HOST, port)
                while await reader.read(1000):
                    pass
            except OSError:
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.sleep(await_order() - time.monotonic())
        tasks = [asyncio.ensure_future(one()) for _ in range(count)]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()

    asyncio.run(all_of_them())


# --- the control node -------------------------------------------------------------------------------


def resident_mb(which: str) -> float:
    """Return this process's memory: now (``VmRSS``), or the most since it was last forgotten (``VmHWM``)."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"\n{which}:")[2].split()[0]) * 1024 / 1e6


def forget_most() -> None:
    """Begin anew with the most memory (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def expect(inbox: queue.SimpleQueue[Message], kind: type[Any], parts: list[subprocess.Popen[str]]) -> Any:
    """Return the next message of a kind."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            message = inbox.get(timeout=1.0)
        except queue.Empty:
            if time.monotonic() > deadline or any(part.poll() not in (None, 0) for part in parts):
                sys.exit(f"waited in vain for {kind.__name__}")
            continue
        if isinstance(message, kind):
            return message
        if isinstance(message, Abort):
            sys.exit(f"the gang broke: {message.error.message[:500]}")


def start(*words: object) -> subprocess.Popen[str]:
    """Start this file again in another part."""
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def order(parts: list[subprocess.Popen[str]], said: str = "ready") -> float:
    """Have all parts go on at the same moment, once they are so far; return when."""
    for part in parts:
        assert part.stdout is not None
        heard = part.stdout.readline()
        assert heard == f"{said}\n", heard
    begin_at = time.monotonic() + 0.2
    for part in parts:
        assert part.stdin is not None
        part.stdin.write(f"{begin_at}\n")
        part.stdin.flush()
    return begin_at


def control(count: int, others: int, processes: int, steady_s: float) -> dict[str, float]:
    """Run a gang of `count` members from its first join to its last verdict; return the figures."""
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    gang = Gang(count + 1, lambda pinned: pinned or pick_port(), WAIT_S)
    token = new_token()
    channel = ControlChannel(gang, inbox.put, token, HEARTBEAT_S)
    port = channel.listen(None, HOST)
    channel.send(Join(0, socket.gethostname()))
    time.sleep(0.2)
    forget_most()
    memory_before, cpu_before = resident_mb("VmRSS"), time.process_time()
    edges = [1 + count * i // processes for i in range(processes + 1)]
    parts = [start("members", a, b, count, port, token) for a, b in itertools.pairwise(edges)]
    crowd = start("unauthenticated", others, port) if others else None
    begin_at = order(parts if crowd is None else [*parts, crowd])
    ready_at = order(parts, "joined")
    cpu_joined = time.process_time() - cpu_before
    channel.send(replace(READY, policy=POLICY))
    expect(inbox, Go, parts)
    time.sleep(2.0)  # until the last has heard it, too
    steady_at, cpu_steady = time.monotonic(), time.process_time()
    time.sleep(steady_s)
    cpu_percent = 100 * (time.process_time() - cpu_steady) / (time.monotonic() - steady_at)
    cpu_failed = time.process_time()
    failed_at = time.monotonic()
    first = report(0, "ValueError: the first", 0.5)
    channel.send(Failed(0, 0, first))
    channel.send(Ended(0, False, 0, first))
    verdict = expect(inbox, Verdict, parts)
    assert "ValueError: the first" in verdict.error.message, verdict.error.message[:500]
    seen = [member for part in parts for member in json.loads(part.communicate()[0])]
    cpu_end = time.process_time() - cpu_failed
    memory = resident_mb("VmHWM") - memory_before
    channel.send(Leave())
    channel.close(10.0)
    if crowd is not None:
        crowd.communicate()
    lost = [m for m in seen if m["error"] or "verdict" not in m["heard"]]
    if lost:
        sys.exit(f"{len(lost)} members are lost, for example {lost[0]}")
    last = {kind: max(m["heard"][kind] for m in seen) for kind in ("welcome", "go", "stop", "verdict")}
    return {
        "members": len(seen),
        "join": last["welcome"] - begin_at,
        "go": last["go"] - ready_at,
        "stop": last["stop"] - failed_at,
        "verdict": last["verdict"] - failed_at,
        "steady": cpu_percent,
        "memory": memory,
        "cpu joined": cpu_joined,
        "cpu end": cpu_end,
    }


def run(members: int, others: int, processes: int, steady_s: float, files: int) -> dict[str, float]:
    """Run a gang in a process of its own, whose memory is that of no other."""
    command = [sys.executable, __file__, "control", *map(str, (members, others, processes, steady_s, files))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        sys.exit(f"a gang with {members} members did not come to its end")
    figures: dict[str, float] = json.loads(ended.stdout)
    assert figures["members"] == members
    return figures


def set_soft_limit(files: int | None) -> None:
    """Set how many files this process may open; None is as many as it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if files is None else files, hard))


def tell(told: Report, members: int, runs: list[dict[str, float]]) -> None:
    """Add what was measured with so many members."""
    go, stop, verdict, steady, memory = TARGETS.get(members, (None,) * 5)
    values = {name: [figures[name] for figures in runs] for name in runs[0]}
    who = f"{members} members"
    told.add(f"{who}: all have joined after", values["join"])
    told.add(f"{who}: all have heard go after", values["go"], target=go)
    told.add(f"{who}: all have heard stop after", values["stop"], target=stop)
    told.add(f"{who}: all have heard the verdict after", values["verdict"], target=verdict)
    told.add(f"{who}: CPU of the control node while nothing happens", values["steady"], "%", steady)
    told.add(f"{who}: its CPU until all have joined", values["cpu joined"])
    told.add(f"{who}: its CPU from the failure to the last verdict", values["cpu end"])
    told.add(f"{who}: its memory", values["memory"], "MB", memory)


def main() -> None:
    """Run gangs of some sizes, each some times."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--members", type=int, nargs="+", default=[10, 100, 1000, 4000])
    options.add_argument("--unauthenticated", type=int, default=0)
    options.add_argument("--processes", type=int, default=2, help="how many share the members")
    options.add_argument("--steady", type=float, default=12.0, help="how many seconds nothing happens")
    options.add_argument("--files", type=int, default=1024, help="the control node's soft limit of open files")
    given = options.parse_args()
    told = Report("thousands of members")
    more = (given.unauthenticated, given.processes, given.steady, given.files)
    for members in given.members:
        tell(told, members, [run(members, *more) for _ in range(given.rounds)])
    told.finish(given.json)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    match sys.argv[1:]:
        case ["members", first, last, count, port, token]:
            set_soft_limit(None)
            run_members(int(first), int(last), int(count), int(port), token)
        case ["unauthenticated", count, port]:
            set_soft_limit(None)
            unauthenticated(int(count), int(port))
        case ["control", members, others, processes, steady_s, files]:
            set_soft_limit(int(files))
            print(json.dumps(control(int(members), int(others), int(processes), float(steady_s))))
        case _:
            main()
