"""Load the last checkpoint on all nodes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoints import InFolder, InMetaflow, find_last


@contextmanager
def last_checkpoint(store: InMetaflow | InFolder) -> Iterator[tuple[int, Path] | None]:
    """Yield the last checkpoint's step and a folder with its files, or None; all ranks must call it.

    Rank 0 chooses, since the others might see a newer one. One process of each node downloads the files.
    """
    chosen = [find_last(store) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        yield None
        return
    step, keys = chosen[0]
    folder = node_folder("resumed")
    if os.environ["LOCAL_RANK"] == "0":
        for key in keys:
            store.load(key, folder)
    dist.barrier()
    yield step, folder
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        shutil.rmtree(folder)


def node_folder(name: str) -> Path:
    """Return a new folder for all ranks of this node; local rank 0 creates it."""
    made = [tempfile.mkdtemp(prefix=f"{name}-") if os.environ["LOCAL_RANK"] == "0" else ""]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, made[0])
    first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
    return Path(everywhere[first])
