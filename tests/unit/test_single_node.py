"""What the cards of a task show of `TorchrunSingleNodeMultiGPU`, the gang of one."""

import json
from types import SimpleNamespace

import pytest
from metaflow import current
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun import gang_of_one
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU


@pytest.fixture
def runner(monkeypatch):
    """Return a runner whose launches write down what its part of a card shows meanwhile."""

    class Executor:
        def __init__(self, context):
            self._member = context.member

        def run(self, *_, **__):
            self._member.emit(Event("command", 0, "runs: torchrun train.py"))
            eventually(lambda: "missing: node 0" not in shown(), "its join, which the gang's thread handles")
            seen.append(shown())
            if fails:
                raise ValueError("no")

    monkeypatch.setattr(gang_of_one, "TorchrunExecutor", Executor)
    monkeypatch.setattr(gang_of_one, "print_errors_ourselves", lambda **_: None)
    runner, seen, fails = TorchrunSingleNodeMultiGPU(), [], []
    part = runner.card("outcome", "launch")

    def shown():
        return json.dumps(part.render())

    return SimpleNamespace(run=runner.run, seen=seen, fails=fails, shown=shown)


def test_a_part_shows_the_launch_of_its_runner(runner):
    assert "No launch has begun yet." in runner.shown()
    runner.run(entrypoint="train.py")
    (during,) = runner.seen
    assert "1 node joined;" in during.replace("&#x27;", "'")
    assert "torchrun train.py" in during
    assert "torchrun train.py" in runner.shown()


def test_a_launch_that_fails_makes_the_last_cards(runner, monkeypatch):
    made = []
    monkeypatch.setattr(gang_of_one.LiveCard, "make_last", lambda self: made.append(self.settle()))
    runner.fails.append(1)
    with pytest.raises(ValueError, match="no"):
        runner.run(entrypoint="train.py")
    assert len(made) == 1


def test_within_a_gang_the_tasks_cards_stay_the_gangs(runner, monkeypatch):
    given = []
    monkeypatch.setattr(
        gang_of_one, "LiveCard", lambda *args, with_ours, **_: given.append(with_ours) or FakeLiveCard()
    )
    current._update_env({"torch": object()})
    runner.run(entrypoint="train.py")
    current._update_env({"torch": None})
    runner.run(entrypoint="train.py")
    assert given == [False, True]


class FakeLiveCard:
    def for_part(self):
        return {}

    def follow_parts(self):
        pass

    def settle(self):
        pass

    def make_last(self):
        pass


def test_it_imports_beforehand_from_the_first_launch_that_asks_for_it_to_its_own_end(runner, monkeypatch):
    begun, contexts = [], []

    class Warm:
        is_closed = False

        def close(self):
            self.is_closed = True

    def begin(features, settings, machine, requested):
        begun.append((settings.warm, settings.nproc_per_node, Warm()))
        return begun[-1][2]

    class Executor:
        def __init__(self, context):
            contexts.append(context)

        def run(self, *_, **__):
            pass

    monkeypatch.setattr(gang_of_one, "starts_of", begin)
    monkeypatch.setattr(gang_of_one, "TorchrunExecutor", Executor)
    one = TorchrunSingleNodeMultiGPU()
    one.run(entrypoint="train.py")
    one.run(entrypoint="train.py", warm="workers", nproc_per_node=2)
    one.run(entrypoint="train.py", warm="agent")
    ((asked, nproc, warm),) = begun
    assert (asked, nproc) == ("workers", 2)
    assert [context.warm for context in contexts] == [None, warm, warm]
    assert not warm.is_closed
    del one
    assert warm.is_closed


@pytest.mark.parametrize(
    "wrong", [{"warm": "yes"}, {"nproc_per_node": "größe"}, {"max_restarts": -1}, {"timeout_s": 0}]
)
def test_a_wrong_argument_is_named_as_one_of_run(wrong, monkeypatch, tmp_path):
    """A single node has no step of ours, and no attributes of one."""
    monkeypatch.setattr(gang_of_one, "print_errors_ourselves", lambda **_: None)
    monkeypatch.setattr(gang_of_one, "LiveCard", lambda *_, **__: FakeLiveCard())
    with pytest.raises(TorchrunConfigError) as caught:
        TorchrunSingleNodeMultiGPU().run(["true"], **{"warm": False, **wrong})
    ((name, value),) = wrong.items()
    assert caught.value.message.startswith(f"run({name}) is {value!r}, but ")
