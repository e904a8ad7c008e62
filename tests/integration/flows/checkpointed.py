"""A gang that goes on from its last checkpoint, whatever becomes of it; then a function looks at all of them."""

import os
import tempfile
from pathlib import Path

from around import Around
from metaflow import Checkpoint, checkpoint, current, retry, step, torchrun
from notes import note


def look():
    """Return what a function sees of the checkpoints; on rank 0 it keeps one of its own by the recipe of the docs."""
    kept = Checkpoint()
    found = [one for one in kept.list() if "part" in one["metadata"]]
    (newest,) = [one for one in found if one["metadata"]["step"] == 10 and one["metadata"]["part"] == 0]
    with kept:
        kept.load(newest["key"])
        files = os.listdir(kept.directory)
    try:
        current.checkpoint.list()
    except AttributeError as error:
        refused = str(error)
    attempts = sorted({int(one["attempt"]) for one in found})
    seen = {"attempts": attempts, "count": len(found), "files": files, "refused": refused, "task": current.pathspec}
    return {**seen, "recipe": follow_recipe() if os.environ["RANK"] == "0" else None}


def follow_recipe():
    """Return which step the recipe loads, before it has saved one and after, and the file that it then has."""
    import recipe

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before = recipe.load_last(first)
        Path(first, "mine").write_text("own")
        recipe.save(12, first)
        return [before, recipe.load_last(second), Path(second, "mine").read_text()]


class CheckpointedFlow(Around):
    @retry(times=2, minutes_between_retries=0)
    @checkpoint(load_policy="none", show_card=False)
    @torchrun(max_restarts=1, restart_on="user", grace_s=20)
    @step
    def train(self):
        note(f"task-{current.retry_count}-{current.parallel.node_index}", {"pid": os.getpid()})
        current.torch.run("checkpointed_worker.py", env={"ATTEMPT": current.retry_count})
        seen = current.torch.run(look, gather=True)
        if current.torch.is_control:
            count = len(current.checkpoint.list())
            note("seen", {"by functions": list(seen), "task": current.pathspec, "by the task": count})
        self.next(self.join)


if __name__ == "__main__":
    CheckpointedFlow()
