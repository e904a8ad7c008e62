"""What `current.torch` makes of a call, before anything runs."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun import executor
from metaflow_extensions.torchrun.plugins.torchrun.devices import Machine, Nproc
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.events import Event
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor, rename_node
from metaflow_extensions.torchrun.plugins.torchrun.failure import Cause
from metaflow_extensions.torchrun.plugins.torchrun.launch_state import Launch
from metaflow_extensions.torchrun.plugins.torchrun.membership import Membership
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings


@pytest.fixture
def spec_of(monkeypatch, tmp_path):
    """Return a function that calls `run` and returns the launch that its supervisor would get."""
    (tmp_path / "train.py").touch()
    launches = []

    class Recorder:
        def __init__(self, spec, *_):
            launches.append(spec)

        def run(self):
            return None

    monkeypatch.setattr(executor, "Supervisor", Recorder)
    monkeypatch.setattr(executor, "node_facts", lambda *_: {})

    def call(attributes=None, requested=None, gpus=(), positional=("train.py",), **arguments):
        seat = Membership(0, 2, lambda _: None)
        settings = parse_settings(attributes or {}, "train")
        machine = Machine(8, gpus)
        said: list[Event] = []
        context = Context(seat, "127.0.0.1", machine, settings, requested, str(tmp_path), emit=said.append)
        TorchrunExecutor(context).run(*positional, **arguments)
        return launches[-1], said[-1].text

    return call


REQUESTED = Nproc(4, "@kubernetes requests gpu=4")


@pytest.mark.parametrize(
    ("run", "option", "attribute", "requested", "gpus", "nproc", "said"),
    [
        (5, None, 7, REQUESTED, ("0", "1"), 5, "run(nproc_per_node)"),
        (None, 6, 7, REQUESTED, ("0", "1"), 6, "torchrun_args"),
        (None, None, 7, REQUESTED, ("0", "1"), 7, "@torchrun(nproc_per_node)"),
        (None, None, None, REQUESTED, ("0", "1"), 4, "@kubernetes requests gpu=4"),
        (None, None, None, None, ("0", "1"), 2, "2 visible accelerators"),
        (None, None, None, None, (), 1, "one process"),
    ],
)
def test_processes_per_node_come_from_the_strongest(spec_of, run, option, attribute, requested, gpus, nproc, said):
    options = {} if option is None else {"torchrun_args": {"nproc_per_node": option}}
    spec, text = spec_of({"nproc_per_node": attribute}, requested, gpus, nproc_per_node=run, **options)
    assert spec.nproc == nproc
    assert said in text


@pytest.mark.parametrize(
    ("run", "attribute", "port"), [(29501, 29500, 29501), (None, "29500", 29500), (None, None, None)]
)
def test_the_port_of_the_call_comes_before_the_attributes(spec_of, run, attribute, port):
    assert spec_of({"master_port": attribute}, master_port=run)[0].master_port == port


@pytest.mark.parametrize(
    ("arguments", "restarts"),
    [({"max_restarts": 3}, 3), ({"torchrun_args": ["--max-restarts=4"]}, 4), ({"max_restarts": 0}, 0), ({}, 2)],
)
def test_the_restarts_of_the_call_come_before_the_attributes(spec_of, arguments, restarts):
    assert spec_of({"max_restarts": "2"}, **arguments)[0].max_restarts == restarts


def test_positional_arguments_may_stand_in_the_order_of_0_2(spec_of):
    options, args = {"max_restarts": 3, "tee": "3"}, {"epochs": 1}
    today, _ = spec_of(positional=("train.py", args), torchrun_args=options, nproc_per_node=2)
    assert spec_of(positional=(options, "train.py", args, 2))[0] == today
    assert spec_of(positional=(options, "train.py", args, 2, True, "out", None))[0] == today
    assert spec_of(positional=(options, "train.py"), entrypoint_args=args, nproc_per_node=2)[0] == today
    assert spec_of(positional=([], "train.py", args))[0] == spec_of(positional=("train.py", args))[0]
    with pytest.raises(TypeError, match="entrypoint"):
        spec_of(positional=(options, "train.py"), entrypoint="other.py")


@pytest.mark.parametrize("rank", [0, None])
def test_a_gang_of_one_in_a_gangs_step_speaks_of_the_node_that_it_is_there(rank):
    kind = "exit" if rank == 0 else "terminated"
    error = Launch(0).error(Cause(kind, 0, "Host-B", rank, rank, 3, "it had to"), [])
    rename_node(error, 2)
    assert "ode 2 (host Host-B)" in error.message
    assert "ode 0 (" not in error.message
    assert error.cause["node"] == 2
    nameless = TorchrunError("no cause")
    rename_node(nameless, 2)
    assert nameless.message == "no cause"
