"""A flow without @torchrun that uses current.torch; a mutator would add @torchrun to a step that is not there."""

import os

from around import Around
from metaflow import FlowMutator, current, parallel, step


class GangByName(FlowMutator):
    """Makes one step a gang."""

    def mutate(self, mutable_flow):
        for name, mutable_step in mutable_flow.steps:
            if name == "trian":
                mutable_step.add_decorator("torchrun")


def same(decorated):
    return decorated


MADE = os.environ["MADE"]


@(GangByName if MADE == "by a mutator" else same)
class UndecoratedFlow(Around):
    @(same if MADE == "plain" else parallel)
    @step
    def train(self):
        gang = current.torch
        gang.run("worker.py")
        self.next(self.join)


if __name__ == "__main__":
    UndecoratedFlow()
