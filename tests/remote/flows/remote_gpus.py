"""Four gangs of one node, each with accelerators requested in another way; the workers need none."""

import json

import plan
from metaflow import FlowSpec, batch, current, kubernetes, resources, step, torchrun

SMALL = {"cpu": 0.25, "memory": 1024}
if plan.KUBERNETES is not None:
    WAYS = {
        "plain": [kubernetes(gpu=4, **SMALL)],
        "merged": [resources(gpu=2), kubernetes(**SMALL)],
        "other": [kubernetes(extended_resources={"nvidia.com/gpu": "8"}, **SMALL)],
        "none": [kubernetes(gpu=0, **SMALL)],
    }
else:
    WAYS = {
        "plain": [batch(gpu=8)],
        "merged": [resources(gpu=2), batch()],
        "other": [batch(trainium=1)],
        "none": [batch(gpu=0)],
    }


def way(name):
    """Decorate a step with the resources of that way."""

    def decorate(function):
        for decorator in WAYS[name]:
            function = decorator(function)
        return function

    return decorate


class RemoteGpus(FlowSpec):
    @step
    def start(self):
        self.found = {}
        self.next(self.plain, num_parallel=1)

    def work(self):
        result = current.torch.run(entrypoint="worker.py")
        self.seen = [current.torch.nproc_per_node, len(result.exit_codes)]

    def note(self, name, inputs):
        (node,) = inputs
        self.found = {**node.found, name: node.seen}

    @way("plain")
    @torchrun
    @step
    def plain(self):
        self.work()
        self.next(self.after_plain)

    @step
    def after_plain(self, inputs):
        self.note("plain", inputs)
        self.next(self.to_merged)

    @step
    def to_merged(self):
        self.next(self.merged, num_parallel=1)

    @way("merged")
    @torchrun
    @step
    def merged(self):
        self.work()
        self.next(self.after_merged)

    @step
    def after_merged(self, inputs):
        self.note("merged", inputs)
        self.next(self.to_other)

    @step
    def to_other(self):
        self.next(self.other, num_parallel=1)

    @way("other")
    @torchrun
    @step
    def other(self):
        self.work()
        self.next(self.after_other)

    @step
    def after_other(self, inputs):
        self.note("other", inputs)
        self.next(self.to_none)

    @step
    def to_none(self):
        self.next(self.none, num_parallel=1)

    @way("none")
    @torchrun
    @step
    def none(self):
        self.work()
        self.next(self.after_none)

    @step
    def after_none(self, inputs):
        self.note("none", inputs)
        self.next(self.end)

    @step
    def end(self):
        print("FOUND " + json.dumps(self.found))


if __name__ == "__main__":
    RemoteGpus()
