"""Writes much of one kind to stdout, as fast as it can: in a worker, or in a step that has none."""

import json
import os
import sys
import time

# As much as Python's own buffer holds. So each write is as large as those of `print` with a buffer.
PIECE_BYTES = 8 * 1024
FIRST_LINE, LAST_LINE = "begins to write", "has written all"
LINE = f"step 0001234 of the epoch, loss 0.1234 {'x' * 60}"
LINES = "short lines"
KINDS = {
    LINES: lambda: f"{LINE}\n".encode() * (PIECE_BYTES // 100),
    "one long line": lambda: b"x" * PIECE_BYTES,
    "binary": lambda: os.urandom(PIECE_BYTES),  # with line ends and returns in it
}


def write(kind: str, size: int, rank: int, prints: bool) -> None:
    """Write `size` bytes between two lines that tell begin and end; lines one by one if it `prints`."""
    print(f"rank {rank} {FIRST_LINE}", flush=True)
    if prints and kind == LINES:
        for _ in range(size // (len(LINE) + 1)):
            print(LINE)
    else:
        piece, left = memoryview(KINDS[kind]()), size
        while left > 0:
            left -= os.write(1, piece[:left])
    print(f"\nrank {rank} {LAST_LINE}", flush=True)


def note(name: str, **facts: float) -> None:
    """Leave facts for the benchmark."""
    with open(os.path.join(os.environ["BENCHMARK_FOLDER"], f"{name}.json"), "w", encoding="ascii") as file:
        json.dump(facts, file)


def main(kind: str, size: str, prints: str = "") -> None:
    """Write, and note how long it took."""
    rank = int(os.environ["RANK"])
    began = time.time()
    write(kind, int(size), rank, bool(prints))
    note(f"worker-{rank}", began=began, seconds=time.time() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
