"""Nodes whose steps end in different ways: ``GANG_HOOK`` names what node 1 does, and `fewer` what node 0 leaves out."""

import json
import os
import threading
import time

import metaflow
from metaflow import FlowSpec, TorchrunError, current, step, torchrun

HOOK = os.environ.get("GANG_HOOK", "")


def note(name, what):
    path = os.path.join(os.environ["GANG_OUT"], name)
    with open(path + ".part", "w") as file:
        json.dump(what, file)
    os.replace(path + ".part", path)


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
        if current.parallel.node_index == 1:
            if HOOK == "artifact":
                self.bad = threading.Lock()
            if HOOK == "fewer":
                begun = time.monotonic()
                try:
                    current.torch.run("worker.py")
                except TorchrunError as error:
                    note("error", {"text": str(error), "seconds": time.monotonic() - begun})
                    raise
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    EndsFlow()
