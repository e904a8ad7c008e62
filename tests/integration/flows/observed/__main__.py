"""The same as a module, ``python -m observed``; at first rank 1 fails, and rank 0 saves what it has when it is stopped."""

from . import seen  # isort: skip - it notes which modules there are

seen.note(same=seen.everything(), random=seen.drawn())

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from spares import await_spares  # noqa: E402

READY = os.path.join(os.environ["GANG_OUT"], os.environ["TORCHELASTIC_RUN_ID"] + "-ready")


def save(number, frame):
    signal.signal(number, signal.SIG_IGN)  # torchrun may be as fast as the supervisor, so that both tell it
    print("saves at", signal.Signals(number).name, "in", frame.f_code.co_name)
    print("has saved", file=sys.stderr)
    sys.exit(21)


def wait_for(condition):
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


if seen.LAUNCH.endswith("-0"):
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, save)
        os.close(os.open(READY, os.O_CREAT))
        wait_for(lambda: False)
    wait_for(lambda: os.path.exists(READY))
    with open(os.path.join(os.environ["GANG_OUT"], "spares")) as file:
        await_spares(int(file.read()))
    raise ConnectionError("rank 1 fails")
