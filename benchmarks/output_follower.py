"""Starts torchrun with its output in files, as we do, and follows them as a task does, with this process's stdout.

It takes the folder of the logs and torchrun's command line.
"""

import subprocess
import sys
import time

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
from output_worker import note, peak_mb

from metaflow_extensions.torchrun.plugins.torchrun.node.console import write_output
from metaflow_extensions.torchrun.plugins.torchrun.node.logs import LogFollower

_began: list[float] = []


def write(stream: str, lines: bytes) -> bool:
    """Write, and note when the first time was."""
    if not _began:
        _began.append(time.time())
    return write_output(stream, lines, more_follows=bool(lines))


def main(folder: str, command: list[str]) -> int:
    """Follow until torchrun has ended; note when the first look was that has found something, and what it has used."""
    follower = LogFollower(folder, {}, "[rank {}] ".format, "", write)
    used = time.process_time()
    torchrun = subprocess.Popen(command)
    follower.start()
    code = torchrun.wait()
    follower.finish()
    note("reader", began=_began[0], cpu=time.process_time() - used, peak_mb=peak_mb())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
