"""A worker that leaves files in its working directory. ``failing`` as its argument: it then fails where it is rank 1."""

import json
import os
import sys
from pathlib import Path

RANK, KIND = os.environ["RANK"], sys.argv[1]

shards = Path(KIND, "shards")
shards.mkdir(parents=True)
(shards / f"{RANK}.bin").write_bytes(RANK.encode() * 3_000_000)
Path(f"{KIND}-{RANK}.json").write_text(json.dumps({"commands": Path("commands.txt").read_text().splitlines()}))
if KIND == "failing":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # else the other rank might be stopped before it has written its files
    if RANK == "1":
        raise ValueError("after saving")
