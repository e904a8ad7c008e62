"""Calls of `current.torch.run` whose launches are only written down."""

from fake_link import FakeLink, member_of

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Verdict
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine, Nproc
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Outcome


def recorded_calls(monkeypatch, tmp_path):
    """Return a function that calls `run` and returns the `Call`, and what is said of it.

    Its `plans` are those of all launches, and `complete` is what the last one does after its commands.
    """
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    plans = []

    class Recorder:
        def __init__(self, made, member, complete, *_):
            call.complete = complete
            plans.append(made)

        def run(self):
            return Outcome(Verdict(0), "", {}, (), 1.5)

        def result(self, outcome):
            pass

    monkeypatch.setattr(executor, "LaunchCall", Recorder)
    monkeypatch.setattr(executor, "with_facts", lambda made: made)
    monkeypatch.setattr(executor, "shm_warning", lambda *_: None)
    monkeypatch.setattr(executor, "_warned", set())

    def call(attributes=None, positional=("train.py",), **arguments):
        said = []
        link = FakeLink()
        link.send = lambda what, *event: said.append(Event(*event)) if what == "show" else None
        member = member_of(link, 0)
        settings = parse_settings(attributes or {}, "train")
        nproc = Nproc(4, "@kubernetes requests gpu=4")
        TorchrunExecutor(member, "127.0.0.1", Machine(8), settings, nproc).run(*positional, **arguments)
        return plans[-1], [event.text for event in said]

    call.plans = plans
    return call
