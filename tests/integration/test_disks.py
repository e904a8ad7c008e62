"""Gangs whose disks and name servers do not answer: the nodes live on, and nobody counts them as lost."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from gangs import Gang, command_line
from hosts import Host, Switch, cannot
from limits import limit_s

from metaflow_extensions.torchrun.plugins.torchrun.launch.command import AGENT

SILENCE_S = limit_s(3.0)
SETTINGS = {"heartbeat_timeout_s": SILENCE_S}
STUCK = re.compile(r"\[torchrun node 1\].* the disk of \S+ has not answered for 5 s; until it does, ")
MNT_DETACH = 2  # <sys/mount.h>


class HungDisk:
    """A file system in the place of a folder, of which nobody answers what is asked; in the end it is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fuse: int | None = os.open("/dev/fuse", os.O_RDWR)
        except OSError as error:
            cannot(f"this machine has no FUSE: {error}")
        about = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"hung", self._folder.encode(), b"fuse", 0, about) != 0:
            os.close(self._fuse)
            cannot(f"this machine does not let us mount: {os.strerror(ctypes.get_errno())}")

    def end(self) -> None:
        """Let everything that waits for it fail, and the folder be as before; safe to call more than once."""
        if self._fuse is not None:
            self._libc.umount2(self._folder.encode(), MNT_DETACH)
            os.close(self._fuse)
            self._fuse = None


@pytest.fixture
def hang_disk() -> Iterator[Callable[[Path], HungDisk]]:
    """Return a function that puts a disk that does not answer in the place of a folder."""
    made: list[HungDisk] = []

    def make(folder: Path) -> HungDisk:
        made.append(HungDisk(folder))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_launch_whose_disk_does_not_answer_ends_as_it_would_and_no_node_is_lost(gang, hang_disk, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    of_node = {1: ["env", f"TMPDIR={folder}"]}
    gang.start(settings=SETTINGS, wrap=of_node, stand_in=True, hang_timeout_s=2 * SILENCE_S)
    gang.await_workers()
    disk = hang_disk(folder)
    gang.await_that(lambda: STUCK.search(gang.log(1)), "the line of node 1 on its disk")
    gang.await_age(time.monotonic(), 2 * SILENCE_S)
    gang.await_workers(lines=500)
    for rank in (0, 1):  # the metrics of the second can't be read, and its stacks can't be written
        gang.tell(rank, "rest")
    gang.await_that(lambda: "what the workers were doing" in gang.log(1), "the stacks of node 1")
    disk.end()
    gang.await_launch(0)
    for node in (0, 1):
        error = gang.launch(node)
        assert error["class"] == "LaunchHung", gang.told
        assert "Ranks 0, 1: worker.py:" in error["text"]
    assert len(STUCK.findall(gang.log(1))) == 1


def test_a_launch_that_starts_waits_for_its_disk_and_no_node_is_lost(gang, hang_disk, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    of_node = {1: ["env", f"TMPDIR={folder}"]}
    gang.start(settings=SETTINGS, wrap=of_node, stand_in=True, launches=2)
    gang.await_workers()
    gang.let_go()
    gang.await_launch(0)
    (gang.out / "finish").unlink()
    disk = hang_disk(folder)
    gang.begin_launch(1)
    gang.await_that(lambda: "launch 1 starts" in gang.log(0), "launch 1")
    gang.await_age(time.monotonic(), 2 * SILENCE_S)
    disk.end()
    gang.await_workers("launch1-0")
    gang.end_well()


def test_a_record_of_an_exception_that_can_not_be_read_delays_no_verdict(gang):
    gang.start(settings=SETTINGS, stand_in=True)
    gang.await_workers()
    gang.tell(1, "hang-record")
    outcome = gang.await_end(gang.struck_at(1), (0, 1))
    assert outcome.error["cause"]["rank"] == 1, gang.told
    assert (outcome.error["cause"]["kind"], outcome.error["cause"]["exit_code"]) == ("exit", 3)
    assert len(STUCK.findall(gang.log(1))) == 1


# --- a name server that takes its time ------------------------------------------------------------

NAME = "control.example"
# It answers one query after the other, those for the address of our name late.
NAME_SERVER = """
import socket, struct, sys, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:
    query, who = server.recvfrom(4096)
    end = query.index(0, 12) + 5
    is_ours = query[12:end] == b"\\7control\\7example\\0\\0\\1\\0\\1"
    time.sleep(float(sys.argv[1]) if is_ours else 0)
    found = b"\\xc0\\x0c" + struct.pack("!HHIH4s", 1, 1, 0, 4, socket.inet_aton("10.77.0.1")) if is_ours else b""
    if is_ours:
        open(sys.argv[2], "a").write("answered\\n")
    server.sendto(query[:2] + struct.pack("!HHHHH", 0x8180, 1, is_ours, 0, 0) + query[12:end] + found, who)
"""
WITH_NAMES = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


@pytest.fixture
def late_names(make_host: Callable[[str], Host], tmp_path: Path) -> Iterator[tuple[list[Host], list[str]]]:
    """Two connected hosts, and what stands before a command on the first, where `NAME` takes longer than `SILENCE_S`."""
    hosts = [make_host("host-a"), make_host("host-b")]
    Switch(make_host("switch"), hosts)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:1 single-request\n")
    words = ["ip", "netns", "exec", hosts[0].space, sys.executable, "-c", NAME_SERVER, str(2 * SILENCE_S)]
    words.append(str(tmp_path / "answers"))
    with subprocess.Popen(words) as server:
        yield hosts, ["sh", "-c", WITH_NAMES, str(tmp_path / "resolv.conf")]
        server.kill()


def agent_of(gang: Gang, node: int) -> psutil.Process:
    """Return the agent of a node, as soon as it runs."""
    supervisor, found = psutil.Process(gang.supervisor(node)), []

    def is_there() -> bool:
        found[:] = [each for each in supervisor.children() if AGENT in command_line(each.pid, None).split()]
        return bool(found)

    gang.await_that(is_there, f"the agent of node {node}")
    return found[0]


def test_a_name_server_that_takes_longer_than_a_node_may_be_silent_loses_none(late_names, make_gang, tmp_path):
    """Node 1 keeps the launch from beginning, and so the control node tries whether it reaches its own store by name."""
    hosts, with_names = late_names
    answers = tmp_path / "answers"
    gang = make_gang(hosts)
    of_hosts = {"main_ip": NAME, "wrap": {0: with_names}, "etc_hosts": "127.0.0.1 localhost host-a"}
    gang.start(settings=SETTINGS, warm=False, **of_hosts)
    agent = agent_of(gang, 1)
    agent.suspend()  # it still imports torch
    # The first answer is for torchrun.
    gang.await_that(
        lambda: answers.exists() and len(answers.read_text().splitlines()) > 1, "an answer for the supervisor"
    )
    agent.resume()
    gang.await_workers()
    gang.end_well()
