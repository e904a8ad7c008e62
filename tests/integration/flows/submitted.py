"""A gang that never starts: what stands in its way comes from ``GANG_DECORATORS``, as JSON."""

import json
import os

from around import Around
from metaflow import batch, catch, kubernetes, step, torchrun

OFFERED = {"batch": batch, "catch": catch, "kubernetes": kubernetes, "torchrun": torchrun}
WANTED = json.loads(os.environ["GANG_DECORATORS"])


def decorated(step_func):
    """Decorate as the source would, the first of them outermost."""
    for name, attributes in reversed(WANTED.items()):
        step_func = OFFERED[name](**attributes)(step_func)
    return step_func


class SubmittedFlow(Around):
    @decorated
    @step
    def train(self):
        self.next(self.join)


if __name__ == "__main__":
    SubmittedFlow()
