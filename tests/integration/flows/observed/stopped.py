"""Rank 1 fails, and rank 0 saves what it has when it is told to stop."""

import os
import signal
import sys
import time

from spares import await_spares

READY = os.path.join(os.environ["GANG_OUT"], os.environ["TORCHELASTIC_RUN_ID"] + "-ready")
DEADLINE_S = 60.0


def save(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # torchrun may be as fast as the guardian, so that both tell it
    print("saves at", signal.Signals(number).name, "in", frame.f_code.co_name)
    time.sleep(0.2)
    print("has saved", file=sys.stderr)
    sys.exit(21)


def wait_for(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, save)
        os.close(os.open(READY, os.O_CREAT))
        wait_for(lambda: False)
    wait_for(lambda: os.path.exists(READY))
    with open(os.path.join(os.environ["GANG_OUT"], "spares")) as file:
        await_spares(int(file.read()))
    raise ConnectionError("rank 1 fails")
