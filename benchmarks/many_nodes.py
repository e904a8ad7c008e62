"""Run one control node and thousands of members over real sockets, and tell how long they wait and what it costs.

Every member is the real `MemberChannel`; those of one process share a thread. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import queue
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import metaflow  # noqa: F401 - it imports our modules, so it must come before them

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
    Verdict,
    Welcome,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.state import Gang
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port

HOST = "127.0.0.1"
HEARTBEAT_S = 60.0
WAIT_S = 300.0
RANKS = 8
_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n' + "    step(batch)\n" * 100
READY = Ready(0, RANKS, "d" * 64, {"torch": "2.13.0", "python": "3.11.7"})
POLICY = LaunchPolicy(left_s=3600.0, retry_on=frozenset())


def report(node: int, exception: str, age_s: float) -> tuple[Failure, ...]:
    """Return what a node says of its failure."""
    cause = Cause("exception", node, f"host-{node}", node * RANKS, 0, 1, exception, _TRACE)
    return (Failure(cause, age_s),)


# --- a process of members ---------------------------------------------------------------------------


class Member:
    """One member: joins, is ready, fails when told to stop, and notes when it heard what."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.heard: dict[str, float] = {}
        self.error: str | None = None
        self.channel = member_channel.MemberChannel(node, self.deliver, self.lose_control, HEARTBEAT_S)

    def deliver(self, message: Message) -> None:
        """Take a message, in the channel's thread."""
        self.heard.setdefault(type(message).__name__.lower(), time.monotonic())
        if isinstance(message, Welcome):
            self.channel.send(READY)
        elif isinstance(message, Stop):
            lost_peer = report(self.node, "ConnectionError: Connection reset by peer", 0.1)
            self.channel.send(Ended(0, False, 0, lost_peer))
        elif isinstance(message, Verdict):
            self.channel.send(Leave())

    def lose_control(self, reason: str) -> None:
        """Note that the control node is not heard any more, in the channel's thread."""
        self.heard.setdefault("control_lost", time.monotonic())

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


def await_begin() -> float:
    """Say that this process is ready, and return when all begin."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


def members(first: int, last: int, port: int, token: str) -> None:
    """Run members until all have heard their verdict, and print when they heard what."""
    shared = LoopThread("members", print)
    member_channel.LoopThread = lambda *_: shared  # type: ignore[assignment,misc]  # one thread for all
    all_members = [Member(node) for node in range(first, last)]
    begin_at = await_begin()
    for member in all_members:
        asyncio.run_coroutine_threadsafe(member.join(port, token, begin_at), shared.loop)
    deadline = time.monotonic() + WAIT_S
    while not all("ack" in m.heard or "control_lost" in m.heard or m.error for m in all_members):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    print(json.dumps([{"node": m.node, "heard": m.heard, "error": m.error} for m in all_members]))


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
        await asyncio.sleep(await_begin() - time.monotonic())
        tasks = [asyncio.ensure_future(one()) for _ in range(count)]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()

    asyncio.run(all_of_them())


# --- the control node -------------------------------------------------------------------------------


def resident_mb() -> float:
    """Return this process's memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


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


def begin(parts: list[subprocess.Popen[str]]) -> float:
    """Have all parts begin at the same moment, once they are ready."""
    for part in parts:
        assert part.stdout is not None
        assert part.stdout.readline() == "ready\n"
    begin_at = time.monotonic() + 0.2
    for part in parts:
        assert part.stdin is not None
        part.stdin.write(f"{begin_at}\n")
        part.stdin.flush()
    return begin_at


def control(count: int, others: int, processes: int) -> dict[str, float]:
    """Run a gang of `count` members from its first join to its last verdict; return the figures."""
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    gang = Gang(count + 1, lambda pinned: pinned or pick_port(), WAIT_S)
    token = new_token()
    channel = ControlChannel(gang, inbox.put, token, HEARTBEAT_S)
    port = channel.listen(None, HOST)
    channel.send(Join(0, socket.gethostname()))
    channel.send(replace(READY, policy=POLICY))
    time.sleep(0.2)
    memory_before, cpu_before = resident_mb(), time.process_time()
    edges = [1 + count * i // processes for i in range(processes + 1)]
    parts = [start("members", a, b, port, token) for a, b in itertools.pairwise(edges)]
    crowd = start("unauthenticated", others, port) if others else None
    begin_at = begin(parts if crowd is None else [*parts, crowd])
    expect(inbox, Go, parts)
    went_at, cpu_joined = time.monotonic(), time.process_time() - cpu_before
    time.sleep(1.0)  # until the last has heard it, too
    memory_joined = resident_mb()
    failed_at = time.monotonic()
    first = report(0, "ValueError: the first", 0.5)
    channel.send(Failed(0, 0, first))
    channel.send(Ended(0, False, 0, first))
    verdict = expect(inbox, Verdict, parts)
    assert "ValueError: the first" in verdict.error.message, verdict.error.message[:500]
    cpu_all = time.process_time() - cpu_before
    seen = [member for part in parts for member in json.loads(part.communicate()[0])]
    memory_after = resident_mb()
    channel.send(Leave())
    channel.close(10.0)
    if crowd is not None:
        crowd.communicate()
    heard = {kind: [m["heard"].get(kind) for m in seen] for kind in ("welcome", "stop", "verdict")}
    lost = [m for m in seen if m["error"] or "verdict" not in m["heard"]]
    if lost:
        sys.exit(f"{len(lost)} members are lost, for example {lost[0]}")
    return {
        "members": len(seen),
        "last is in (s)": max(heard["welcome"]) - begin_at,
        "go (s)": went_at - begin_at,
        "stop has reached all (s)": max(heard["stop"]) - failed_at,
        "verdict has reached all (s)": max(heard["verdict"]) - failed_at,
        "memory of the joined (MB)": memory_joined - memory_before,
        "memory at the end (MB)": memory_after - memory_before,
        "cpu until all are in (s)": cpu_joined,
        "cpu in all (s)": cpu_all,
    }


def set_soft_limit(files: int | None) -> None:
    """Set how many files this process may open; None is as many as it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if files is None else files, hard))


def main() -> None:
    """Read the arguments and run one part."""
    logging.basicConfig(level=logging.WARNING)
    if sys.argv[1:2] in (["members"], ["unauthenticated"]):
        set_soft_limit(None)
    if sys.argv[1:2] == ["members"]:
        members(*map(int, sys.argv[2:5]), sys.argv[5])
    elif sys.argv[1:2] == ["unauthenticated"]:
        unauthenticated(int(sys.argv[2]), int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--members", type=int, default=4000)
        parser.add_argument("--unauthenticated", type=int, default=0)
        parser.add_argument("--processes", type=int, default=2, help="how many share the members")
        parser.add_argument("--files", type=int, default=1024, help="the control node's soft limit of open files")
        given = parser.parse_args()
        set_soft_limit(given.files)
        for name, value in control(given.members, given.unauthenticated, given.processes).items():
            print(f"{name:<30} {value:8.2f}")


if __name__ == "__main__":
    main()
