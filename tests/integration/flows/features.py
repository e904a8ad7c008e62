"""Gangs among Metaflow's other features: what the step was given gets to the workers, which import nothing."""

import os
from pathlib import Path

from metaflow import (
    Config,
    FlowMutator,
    FlowSpec,
    IncludeFile,
    StepMutator,
    card,
    current,
    environment,
    project,
    retry,
    secrets,
    step,
    timeout,
    torchrun,
)
from notes import note

SECRET = {"type": "inline", "id": "any", "options": {"env_vars": {"FROM_SECRETS": "hush"}}}


class AsGang(StepMutator):
    """Makes a step a gang."""

    def pre_mutate(self, mutable_step):
        mutable_step.add_decorator(torchrun, deco_kwargs={"nproc_per_node": 2})


class GangsByName(FlowMutator):
    """Makes the steps gangs that a config names; another mutator does it."""

    def pre_mutate(self, mutable_flow):
        names = [name for _, value in mutable_flow.configs for name in value["gangs"]]
        for name, mutable_step in mutable_flow.steps:
            if name in names:
                mutable_step.add_decorator(AsGang)


def same(decorator):
    return decorator


shown = card(type="torchrun") if "GANG_CARD" in os.environ else same


def place(name):
    """Return the variable with which workers note what they see in a folder of their own."""
    folder = Path(os.environ["GANG_OUT"], name)
    folder.mkdir(exist_ok=True)
    return {"GANG_OUT": folder}


@GangsByName
@project(name="gangs")
class FeaturesFlow(FlowSpec):
    """Gangs in branches: the first has the features, the other has @torchrun from mutators."""

    config = Config("config", default_value={"attributes": {"nproc_per_node": 2}, "gangs": ["mutated"]})
    text = IncludeFile("text", default="included.txt")

    @step
    def start(self):
        self.next(self.first, self.second)

    @step
    def first(self):
        self.next(self.written, num_parallel=2)

    @step
    def second(self):
        self.next(self.mutated, num_parallel=1)

    @shown
    @retry(times=1)
    @timeout(minutes=2)
    @environment(vars={"FROM_ENVIRONMENT": "a b"})
    @secrets(sources=[SECRET])
    @torchrun(**config.attributes)
    @step
    def written(self):
        size = current.torch.run("worker.py", [self.text, current.project_flow_name], env=place("written")).world_size
        self.said = {"size": size, "branch": current.branch_name, "tags": sorted(current.tags)}
        self.next(self.join_first)

    @step
    def mutated(self):
        self.said = current.torch.run("worker.py", env=place("mutated")).world_size
        self.next(self.join_second)

    @step
    def join_first(self, inputs):
        self.said = [task.said for task in inputs]
        self.next(self.join)

    @step
    def join_second(self, inputs):
        self.said = [task.said for task in inputs]
        self.next(self.join)

    @step
    def join(self, inputs):
        self.said = [inputs.join_first.said, inputs.join_second.said]
        self.next(self.end)

    @step
    def end(self):
        note("end", self.said)


if __name__ == "__main__":
    FeaturesFlow()
