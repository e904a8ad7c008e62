"""Node 1 fails after its step's code; ``GANG_HOOK`` says how."""

import os
import threading

import metaflow
from metaflow import FlowSpec, current, step, torchrun

HOOK = os.environ.get("GANG_HOOK", "")


def after_step(function):
    return function


if HOOK == "decorator":

    @metaflow.user_step_decorator
    def after_step(step_name, flow, inputs=None, attributes=None):
        yield
        if current.parallel.node_index == 1:
            raise ValueError("the results look wrong")


class EndsFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @after_step
    @torchrun
    @step
    def train(self):
        if current.parallel.node_index == 1 and HOOK == "artifact":
            self.bad = threading.Lock()
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    EndsFlow()
