"""A gang of which a disk does not answer: the nodes live on, and nobody counts them as lost."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hosts import cannot
from limits import limit_s

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

    def close(self) -> None:
        """Let everything that waits for it fail, and the folder be as before; safe to call more than once."""
        if self._fuse is not None:
            self._libc.umount2(self._folder.encode(), MNT_DETACH)
            os.close(self._fuse)
            self._fuse = None


@pytest.fixture
def hang_disk() -> Iterator[Callable[[Path], HungDisk]]:
    """Return a function that puts a disk that does not answer in the place of a folder."""
    with ExitStack() as made:
        yield lambda folder: made.enter_context(closing(HungDisk(folder)))


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
    disk.close()
    gang.await_launch(0)
    for node in (0, 1):
        error = gang.launch(node)
        assert error["class"] == "LaunchHung", gang.told
        assert "Ranks 0, 1: worker.py:" in error["text"]
    assert len(STUCK.findall(gang.log(1))) == 1
