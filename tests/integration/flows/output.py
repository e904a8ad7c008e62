"""A worker that writes; argv[1] says what."""

import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])


def live() -> None:
    for _ in range(3):
        for _ in range(3):  # together, then silence: a line that a reader on the way holds back shows
            print(f"now {time.time():.3f}")
        time.sleep(0.7)


def shapes() -> None:
    out, err = sys.stdout.buffer, sys.stderr.buffer
    for number in range(2000):
        out.write(b"line %d of %d\n" % (number, RANK))
    out.write(b"bad \xff\xfe bytes\n")
    out.write("split \u00e9\n".encode()[:7])
    out.flush()
    time.sleep(0.3)
    out.write("split \u00e9\n".encode()[7:])
    for percent in (10, 20, 30):
        out.write(b"\r%d%%" % percent)
    out.write(b"\r\n")
    out.write(b"x" * 300_000 + b"\n")
    out.flush()
    err.write(b"to stderr\n")
    err.flush()
    out.write(b"no newline at the end")
    out.flush()


def flood() -> None:
    block = b"".join(b"%07d " % n + b"y" * 991 + b"\n" for n in range(1_000))
    for _ in range(50):
        sys.stdout.buffer.write(block)


def saves() -> None:
    """Write without end; when it is told to stop, print much and save."""

    def save(*_: object) -> None:
        for number in range(100):
            print(f"saving {number} {'z' * 100}")
        with open(f"{os.environ['GANG_OUT']}/saved-{RANK}", "w") as file:
            file.write("1")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    while True:
        print("y" * 60)


{"live": live, "shapes": shapes, "flood": flood, "saves": saves}[sys.argv[1]]()
