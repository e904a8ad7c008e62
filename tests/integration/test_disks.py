"""A gang of which a disk does not answer: the nodes live on, and nobody counts them as lost."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import cannot
from limits import limit_s

SILENCE_S = limit_s(3.0)
SETTINGS = {"heartbeat_timeout_s": SILENCE_S}
STUCK = "[torchrun node 1] the disk of TMPDIR has not answered for 5 s: metrics may be missing, and of a failure only"
MNT_DETACH = 2  # <sys/mount.h>


@contextmanager
def hung_disk(folder: Path) -> Iterator[None]:
    """Put a file system in the place of a folder, of which nobody answers what is asked; at the end what waits fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        cannot(f"this machine has no FUSE: {error}")
    try:
        about = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"hung", bytes(folder), b"fuse", 0, about) != 0:
            cannot(f"this machine does not let us mount: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        libc.umount2(bytes(folder), MNT_DETACH)
        os.close(fuse)


def test_a_launch_whose_disk_does_not_answer_ends_as_it_would_and_no_node_is_lost(gang, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    of_node = {1: ["env", f"TMPDIR={folder}"]}
    gang.start(settings=SETTINGS, wrap=of_node, stand_in=True, hang_timeout_s=2 * SILENCE_S)
    gang.await_workers()
    with hung_disk(folder):
        gang.await_age(time.monotonic(), 2 * SILENCE_S)
        gang.await_workers(lines=500)
        for rank in (0, 1):  # the metrics of the second can't be read, and its stacks can't be written
            gang.tell(rank, "rest")
        gang.await_that(lambda: "what the workers were doing" in gang.log(1), "the stacks of node 1")
        gang.await_that(lambda: STUCK in gang.log(1), "the line of node 1 on its disk")
    gang.await_launch(0)
    for node in (0, 1):
        error = gang.launch(node)
        assert error["class"] == "LaunchHung", gang.told
        assert "Ranks 0, 1: worker.py:" in error["text"]
    assert gang.log(1).count(STUCK) == 1
