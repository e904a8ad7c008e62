"""Nodes with different sources, then a step that fails by what a function raises, and comes again."""

import os
import sys

from around import Around
from metaflow import GangError, current, retry, step, torchrun


def attempt_of(attempt):
    check(attempt)
    return attempt


def check(attempt):
    if attempt == 0 and os.environ["RANK"] == "1":
        raise KeyError("only in the first attempt")


class RetriedFlow(Around):
    @retry(times=1, minutes_between_retries=0)
    @torchrun
    @step
    def train(self):
        if current.parallel.node_index == 1:
            sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "functions of node 1"))
        import functions_beside

        try:
            current.torch.run(functions_beside.step)
        except GangError as error:
            self.refusal = str(error)
        try:
            self.result = current.torch.run(attempt_of, [current.retry_count])
        except KeyError as error:
            print("its own exception:", *error.__notes__)
            raise
        self.next(self.join)

    @step
    def join(self, inputs):
        self.refusals = [task.refusal for task in inputs]
        self.attempts = [task.result.local_rank(0) for task in inputs]
        self.next(self.end)

    @step
    def end(self):
        for refusal in self.refusals:
            print("refused:", refusal)
        print("attempts:", self.attempts)


if __name__ == "__main__":
    RetriedFlow()
