"""What the cards of a task show of `TorchrunSingleNodeMultiGPU`, the gang of one."""

import json
from types import SimpleNamespace

import pytest
from fake_cards import cards_of_task
from limits import limit_s
from metaflow import current
from metaflow._vendor import click
from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import HANG_S

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU
from metaflow_extensions.torchrun.plugins.torchrun.task import report


@pytest.fixture
def task(monkeypatch, tmp_path):
    """Have this process be a task with the gang's card, and return what Metaflow has of the card."""
    monkeypatch.setattr(report, "print_errors_ourselves", lambda **_: None)
    monkeypatch.setattr(FlowDataStore, "default_storage_impl", LocalStorage)
    monkeypatch.setattr(LocalStorage, "datastore_root", str(tmp_path / "flows"))
    task = cards_of_task(monkeypatch, tmp_path, "torchrun")
    with click.Context(click.Command("step"), obj=SimpleNamespace(flow_datastore=task.datastore)):
        yield task


@pytest.fixture
def launches(monkeypatch, task):
    """Have each launch do what `do` says with its member."""
    launches = SimpleNamespace(do=lambda member: None)

    class Executor:
        def __init__(self, member, *_, **__):
            self.member = member

        def launched(self, given):
            launches.do(self.member)

    monkeypatch.setattr(executor, "TorchrunExecutor", Executor)
    return launches


def test_a_part_shows_the_launch_of_its_runner(launches):
    runner, during = TorchrunSingleNodeMultiGPU(), []
    part = runner.card("outcome", "launch")

    def shown():
        return json.dumps(part.render())

    def run(member):
        member.link.handle(["event", "command", 0, "runs: torchrun train.py", False])
        assert member.link.wait(lambda: "1 node joined" in shown(), limit_s(HANG_S))
        during.append(shown())

    assert "No launch has begun yet." in shown()
    launches.do = run
    runner.run(entrypoint="train.py")
    assert "torchrun train.py" in during[0]
    assert "torchrun train.py" in shown()


@pytest.mark.parametrize("in_a_gang", [False, True], ids=["alone", "in a gang's step"])
def test_the_card_shows_the_launch_and_how_it_failed_but_within_a_gang_it_is_the_gangs(in_a_gang, launches, task):
    def fail(member):
        if not in_a_gang:
            assert member.link.wait(lambda: len(task.stored()) == 2, limit_s(HANG_S))
        raise ValueError("no")

    launches.do = fail
    current._update_env({"torch": object() if in_a_gang else None})
    with pytest.raises(ValueError, match="no"):
        TorchrunSingleNodeMultiGPU().run(entrypoint="train.py")
    current._update_env({"torch": None})
    found = task.stored()
    assert found == {} if in_a_gang else '"final"' in found["torchrun.html"]
    assert task.commands == []


def test_a_wrong_argument_is_named_as_one_of_run(task):
    """A single node has no step of ours, and no attributes of one."""
    with pytest.raises(TorchrunConfigError, match=r"^run\(max_restarts\) is -1, but "):
        TorchrunSingleNodeMultiGPU().run(["true"], warm=False, max_restarts=-1)


def test_it_needs_linux(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(TorchrunConfigError, match="TorchrunSingleNodeMultiGPU needs Linux"):
        TorchrunSingleNodeMultiGPU()
