"""Calls of `current.torch.run` whose launches are only written down."""

from dataclasses import replace
from typing import ClassVar

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.member import Member
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine, Nproc
from metaflow_extensions.torchrun.plugins.torchrun.result import TorchrunResult
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings


def recorded_calls(monkeypatch, tmp_path, features=()):
    """Return a function that calls `run` and returns spec and policy of the launch, and what is said of it.

    Its `plans` are those of all launches. What is put into its `outcomes` is raised by the next ones. Its `step_of`
    makes a step's `current.torch`, for more than one call, and a list of what is said.
    """
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    launches, plans, outcomes = [], [], []

    class Recorder:
        told: ClassVar = {}

        def __init__(self, plan, member):
            launches.append((plan.spec, plan.policy))
            plans.append(plan)

        def run(self):
            if self_made := outcomes.pop(0) if outcomes else None:
                raise self_made
            return TorchrunResult(0, 2, 0, 4, 8, "", [], 1.5, {})

    monkeypatch.setattr(executor, "Supervisor", Recorder)
    monkeypatch.setattr(executor, "node_facts", lambda *_: {})
    monkeypatch.setattr(executor, "shm_warning", lambda *_: None)
    monkeypatch.setattr(executor, "_warned", set())

    def step_of(attributes=None, warm_node=None, num_nodes=2):
        said = []
        member = Member(0, num_nodes, said.append)
        settings = parse_settings(attributes or {}, "train")
        context = Context(
            member, "127.0.0.1", Machine(8), settings, Nproc(4, "@kubernetes requests gpu=4"), warm=warm_node
        )
        return TorchrunExecutor(replace(context, features=features)), said

    def call(attributes=None, positional=("train.py",), warm_node=None, **arguments):
        step, said = step_of(attributes, warm_node)
        step.run(*positional, **arguments)
        return *launches[-1], [event.text for event in said]

    call.plans, call.outcomes, call.step_of = plans, outcomes, step_of
    return call
