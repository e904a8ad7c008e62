"""Workers that write, spawn and cling to life as they should not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from gangs import GRACE_S, Gang, read_from
from hosts import cannot

LINE_BYTES = 10_000_000
DISK_BYTES = 100 * 4096
RANKS, MESSAGE_CHARACTERS = 6, 20_000


# A file system of its own, that only this process and what it starts can see.
SMALL_DISK = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'


def test_a_disk_that_is_too_small_for_the_output(gang, recorder, tmp_path):
    """Where temporary files go there is hardly any room. Output does not go there."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        cannot("mounting a small disk for one process needs root and unshare (util-linux)")
    (disk := tmp_path / "disk").mkdir()
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SMALL_DISK, "sh", f"size={DISK_BYTES}"]
    tried = subprocess.run([*words, disk, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        cannot(f"this machine does not let us mount a small disk: {tried.stderr.strip()}")
    gang.start(do="1:fill-disk", wrap={1: [*words, str(disk), "env", f"TMPDIR={disk}"]})
    gang.await_workers()
    recorder.lasted("workers write ten times as much as the disk for temporary files takes", gang.end_well())
    shown = [line for line in gang.log(1).splitlines() if line.startswith("[rank 1] x")]
    assert len(shown) == 4000


def test_reports_that_are_too_long_for_a_message(gang, recorder):
    """Together, what the ranks of a node have to say is longer than a message may be."""
    gang.start(nproc=RANKS, do=f"*:shout {MESSAGE_CHARACTERS}")
    outcome = gang.await_end(gang.struck_at(RANKS), [0, 1])
    recorder.died(f"{RANKS} workers on each node raise messages and tracebacks of {MESSAGE_CHARACTERS} emoji", outcome)
    assert "RuntimeError: 🙂🙂🙂" in outcome.error["text"]


def test_a_reader_of_the_log_that_pauses_and_a_step_that_ignores_the_ends_of_its_children(gang, recorder):
    """Both are to go on as if nothing had been."""
    read = gang.out / "read"
    gang.start(step={0: "ignore-sigchld", 1: "do-not-block"}, wrap={1: read_from(read)})
    gang.await_workers(lines=250)  # three times as much as the pipe holds
    assert len(gang.log(1)) == 0
    read.touch()
    outcome = gang.end_well()
    recorder.lasted("who reads a node's output pauses while it is written, without blocking", outcome)
    recorder.lasted("the step's own code ignores SIGCHLD", outcome)


def test_a_worker_that_forks_grandchildren(gang, recorder):
    """Forked twice, in a session of their own, ignoring SIGTERM: they end with the launch all the same."""
    gang.start(do="*:detach")
    gang.await_workers()
    grandchildren = {gang.await_note(f"grandchild-launch0-0-{rank}") for rank in range(2)}
    assert grandchildren <= gang.living()
    gang.tell(1, "exit 3")
    outcome = gang.await_end(gang.struck_at(1), [0, 1])
    recorder.died("a worker with detached grandchildren fails (without the grace)", outcome, GRACE_S)
    assert outcome.seconds >= GRACE_S  # they had their time
    assert "Rank 1 on node 1" in outcome.error["text"]


def test_ten_megabytes_in_one_line(gang, recorder):
    """Nothing of it may be missing although its writer dies at once, nor may other workers' lines get mixed up with it."""
    gang.start(nproc=2)
    gang.await_workers()
    gang.tell(1, f"no-newline {LINE_BYTES}")
    outcome = gang.await_end(gang.struck_at(1), [0, 1])
    wanted, shown = range(LINE_BYTES // 8), shown_numbers(gang)
    outcome.lost_bytes += 8 * len(set(wanted) - set(shown))
    recorder.died("a worker writes 10 MB in one line without a newline, and dies", outcome)
    assert shown == list(wanted)
    assert "Rank 1 on node 0" in outcome.error["text"]


def shown_numbers(gang: Gang) -> list[int]:
    """Return the numbers of rank 1's long line, from the labelled pieces in which the log shows it."""
    pieces = [line for line in gang.log(0).splitlines() if line.startswith("[rank 1] ") and "," in line]
    text = "".join(piece.removeprefix("[rank 1] ") for piece in pieces)
    return [int(number) for number in re.findall(r"(\d{7}),", text)]
