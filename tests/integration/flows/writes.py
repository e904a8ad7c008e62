"""A worker that leaves files in its working directory, and fails if it is told to."""

import os
import sys
import time
from pathlib import Path

RANK, NODE = os.environ["RANK"], os.environ["GROUP_RANK"]
KIND = sys.argv[1]

model = Path(f"{KIND} 模型")
(model / "shards").mkdir(parents=True, exist_ok=True)
(model / "shards" / f"{RANK}.bin").write_bytes(RANK.encode() * 3_000_000)
(model / "config *.json").write_text("{}")
Path(f"{KIND}-{RANK}.json").write_text(f'{{"node": {NODE}}}')
if KIND == "failing" and RANK == "1":
    end = time.monotonic() + 20  # in a pod, node 0's file is not seen
    while not Path("../node 0/failing-0.json").exists() and time.monotonic() < end:
        time.sleep(0.05)  # else rank 0 is stopped before it has written everything
    raise ValueError("after saving")
