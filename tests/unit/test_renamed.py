"""What is left when a private name of Metaflow's is gone: its owner is the real one, and loses one name at a time."""

import importlib.util
import os
import pickle
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import metaflow
import pytest
from flow_runs import RENAMING
from metaflow import FlowSpec, current, flowspec, metaflow_config_funcs, plugins, step, torchrun
from metaflow import datastore as metaflow_datastore
from metaflow.datastore import FlowDataStore
from metaflow.datastore.task_datastore import TaskDataStore
from metaflow.graph import DAGNode
from metaflow.metaflow_current import Parallel
from metaflow.plugins import parallel_decorator
from metaflow.plugins.cards import card_creator
from metaflow.plugins.cards.card_creator import CardCreator, CardProcessManager
from metaflow.plugins.cards.component_serializer import CardComponentCollector, CardComponentManager, ComponentStore
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins import torchrun as extension
from metaflow_extensions.torchrun.plugins.torchrun import decorator as decorators
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.compat import cards, renamed
from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import DatastoreValues, save_log
from metaflow_extensions.torchrun.plugins.torchrun.compat.steps import SameInterpreter
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.launch.outputs import Outputs
from metaflow_extensions.torchrun.plugins.torchrun.logs.task_log import TaskLog
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.show import live_card
from metaflow_extensions.torchrun.plugins.torchrun.task import report as node_report
from metaflow_extensions.torchrun.plugins.torchrun.task import submit_checks
from metaflow_extensions.torchrun.plugins.torchrun.task.task_gang import TaskGang
from metaflow_extensions.torchrun.plugins.torchrun.worker import function_worker

STORING = ("persist", "save_metadata", "done")


class Flow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun
    @step
    def train(self):
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


class Gone:
    """An attribute that no object of its class has, or can get."""

    def __init__(self, name):
        self.name = name

    def __get__(self, thing, kind=None):
        raise AttributeError(f"no attribute {self.name!r}")

    def __set__(self, thing, value):
        raise AttributeError(f"no attribute {self.name!r}")


@pytest.fixture
def take_away(monkeypatch):
    """Return a function that takes a name away from a module of Metaflow's, or from a class and all its objects."""
    monkeypatch.setattr(renamed, "_said", set())

    def take(owner, name):
        if isinstance(owner, type):
            monkeypatch.setattr(owner, name, Gone(name), raising=False)
        else:
            monkeypatch.delattr(owner, name)

    return take


def left_out(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("[torchrun] Left out: ")]


# --- conveniences ---------------------------------------------------------------------------------


@pytest.fixture
def datastore(tmp_path):
    return FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path / "store"))


@pytest.fixture
def gang(monkeypatch, datastore):
    """Return the gang of a task with two cards of Metaflow's: ours, and one of the user's with a part of it."""
    monkeypatch.setattr(type(current), "parallel", Parallel("127.0.0.1", 1, 0, None), raising=False)
    for name, value in {"flow_name": "GangFlow", "run_id": "1", "step_name": "train", "task_id": "2"}.items():
        monkeypatch.setattr(current, f"_{name}", value)
    monkeypatch.setattr(CardCreator, "_run_cards_subprocess", lambda self, *args, **options: None)
    monkeypatch.setattr(live_card, "_LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(live_card, "_SHORTEST_S", 0.0)
    cards = CardComponentCollector(card_creator=CardCreator([], lambda uuid: (False, {})))
    attributes = {"type": "torchrun", "timeout": None, "save_errors": True}
    cards._add_card("torchrun", None, attributes, {}, runtime_card=True)
    cards._add_card("blank", "own", {**attributes, "type": "blank"}, {}, editable=True, runtime_card=True)
    cards._finalize()
    current._update_env({"card": cards})
    gang = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0)
    yield gang
    gang.leave(None)
    current._update_env({"card": None})


NAMES_OF_CARDS = [
    (CardComponentCollector, "get"),
    (CardComponentCollector, "_card_component_store"),
    (CardComponentManager, "_card_creator_args"),
    (CardComponentManager, "_card_creator"),
    (CardComponentManager, "_latest_user_data"),
    (CardComponentManager, "_card_proc"),
    (CardComponentManager, "_last_layout_change"),
    (CardComponentManager, "_render_seq"),
    (CardComponentManager, "_last_render"),
    (CardComponentManager, "components"),
    (CardComponentManager, "refresh"),
    (ComponentStore, "layout_last_changed_on"),
    (CardProcessManager, "_get_card_process"),
    (card_creator, "CardProcessManager"),
    (CardCreator, "create"),
]


def run_step(gang, take, error):
    """Run a step that has `take` take a name away while its gang is there, and that then ends well or with `error`."""

    def train():
        gang.join()
        current.card["own"].append(gang.live_card.part(("outcome",)))
        take()
        cards.of_type("torchrun")
        gang.live_card._renew(cards.with_component(live_card.GangPart))
        if error is not None:
            raise error
        gang.finish()

    gang.run(train)


@pytest.mark.parametrize(("owner", "name"), NAMES_OF_CARDS, ids=[name for _, name in NAMES_OF_CARDS])
def test_without_a_name_of_its_cards_a_gang_ends_with_its_own_error(owner, name, gang, take_away, capfd):
    error = GangError("the cause")
    with pytest.raises(GangError) as caught:
        run_step(gang, lambda: take_away(owner, name), error)
    assert caught.value is error
    said = left_out(capfd)
    assert len(said) in (1, 2), f"one line for the live cards, one for the last: {said}"
    assert all(f"this is {metaflow.__version__} (" in line and name in line for line in said)


@pytest.mark.parametrize(("owner", "name"), NAMES_OF_CARDS, ids=[name for _, name in NAMES_OF_CARDS])
def test_without_a_name_of_its_cards_a_gang_ends_well(owner, name, gang, take_away):
    run_step(gang, lambda: take_away(owner, name), None)
    gang.leave(None)


def test_with_all_names_nothing_is_left_out(gang, take_away, capfd):
    with pytest.raises(GangError):
        run_step(gang, lambda: None, GangError("the cause"))
    assert left_out(capfd) == []


@pytest.mark.parametrize("name", STORING)
def test_without_a_name_of_its_results_the_others_are_still_watched(name, gang, datastore, take_away, capfd):
    results = datastore.get_task_datastore("1", "train", "2", attempt=0, mode="w")
    take_away(TaskDataStore, name)
    gang.watch_storing(results)
    (line,) = left_out(capfd)
    assert "results that can't be stored" in line
    assert [other for other in STORING if other in vars(results)] == [other for other in STORING if other != name]


def test_a_report_that_can_not_be_made_leaves_the_error_as_it_is(gang, take_away, monkeypatch, capfd):
    error = GangError("the cause")
    monkeypatch.setattr(type(current), "parallel", None)
    with pytest.raises(GangError) as caught:
        gang.run(lambda: (_ for _ in ()).throw(error))
    assert caught.value is error
    assert "our own report of the error" in "".join(left_out(capfd))


class Task:
    def __init__(self):
        self.ubf_iter = SimpleNamespace(num_parallel=2)


class CliArgs:
    def __init__(self):
        self.task, self.command_options, self.env = Task(), {}, {}


class Timeout:
    name = "timeout"

    def __init__(self):
        self.attributes, self.secs = {}, 5


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *[(DAGNode, name) for name in ("out_funcs", "parallel_foreach", "num_parallel", "split_parents")],
        *[(CliArgs, name) for name in ("task", "command_options", "env")],
        *[(FlowDataStore, "metadata"), (Task, "ubf_iter"), (Timeout, "secs"), (FlowDataStore, "nothing")],
    ],
)
def test_without_a_name_that_checks_look_at_a_gang_is_submitted(owner, name, datastore, take_away, monkeypatch, capfd):
    monkeypatch.setattr(type(current), "parallel", None, raising=False)  # which `step_init` sets
    monkeypatch.setattr(parallel_decorator.ParallelDecorator, "runtime_step_cli", lambda *_: None)
    monkeypatch.setattr(node_report, "print_errors_ourselves", lambda in_task: None)
    deco, cli_args = TorchrunDecorator(), CliArgs()
    siblings = [deco, Timeout(), SimpleNamespace(name="kubernetes", attributes={})]
    take_away(owner, name)
    deco.step_init(Flow(use_cli=False), Flow._graph, "train", siblings, SimpleNamespace(), datastore, print)
    deco.package_init(None, "train", None)
    deco.runtime_step_cli(cli_args, 0, 0, "ubf_control")
    submit_checks.check_entered_with_num_parallel(Flow._graph)
    assert len(left_out(capfd)) == (0 if name in ("metadata", "nothing") else 2 if name in LOOKED_AT_TWICE else 1)


LOOKED_AT_TWICE = {"out_funcs", "parallel_foreach", "env"}  # by two conveniences


def test_an_environment_is_asked_whatever_metaflow_asks():
    asked = []
    real = SimpleNamespace(executable=lambda *args, **options: asked.append((args, options)) or "python", colour="red")
    same = SameInterpreter(SimpleNamespace(base_env=real))
    assert same.executable("train", default=None, kind="new") == sys.executable
    assert asked == [(("train",), {"default": None, "kind": "new"})]
    assert same.colour == "red"
    assert getattr(same, "base_env", same) is same, "else the base environment would be asked itself"


def test_metaflows_printing_may_take_more_than_the_error(monkeypatch):
    printed = []
    monkeypatch.setattr(node_report, "_in_task", False)
    node_report._print_error(lambda *args, **options: printed.append((args, options)), KeyError("x"), 1, colour="red")
    assert printed[0][0][1:] == (1,)
    assert printed[0][1] == {"colour": "red"}


def test_without_its_log_a_task_goes_on(take_away, tmp_path, capfd):
    log = tmp_path / "log"
    log.write_text("a line\n")
    store = FlowDataStore("GangFlow", storage_impl=LocalStorage, ds_root=str(tmp_path / "store"))
    take_away(TaskDataStore, "save_logs")
    TaskLog(partial(save_log, store, ("1", "train", "2", 0)), {"MFLOG_STDOUT": str(log)}).save(10)
    assert "the early upload of this task's log" in "".join(left_out(capfd))


def test_a_worker_whose_current_can_not_be_filled_goes_on(capfd):
    module = SimpleNamespace(current=SimpleNamespace())  # it has no `_update_env`
    function_worker.tell_current(module, pickle.dumps({"state": {}, "values": {}, "withheld": []}))
    assert "what `current` says" in "".join(left_out(capfd))


# --- what a gang can't do without -----------------------------------------------------------------


def registry(datastore, tmp_path):
    Registry(datastore, "1", "train", "2", 0)


def store_value(datastore, tmp_path):
    values = DatastoreValues(datastore)
    list(values.load([values.save(b"value")]))


def read_outputs(datastore, tmp_path):
    store_list = DatastoreValues(datastore)
    key = store_list.save(b'{"files": [], "left_out": {}}')
    list(Outputs(store_list.address, {0: (key, 0, 0)}))


def decorate(datastore, tmp_path):
    TorchrunDecorator()


def spin(datastore, tmp_path):
    decorators._make_gang_of_one(SimpleNamespace(_parallel_ubf_iter=flowspec.ParallelUBF(2)))


def join(datastore, tmp_path):
    gang = TaskGang(parse_settings(DEFAULTS, "train"), datastore, "1", "train", "2", 0)
    gang.run(gang.join)


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (FlowDataStore, "get_task_datastore", registry),
        (TaskDataStore, "load_metadata", registry),
        (TaskDataStore, "save_metadata", registry),
        (FlowDataStore, "save_data", store_value),
        (FlowDataStore, "load_data", store_value),
        (metaflow_datastore, "FlowDataStore", read_outputs),
        (plugins, "DATASTORES", read_outputs),
        (parallel_decorator, "ParallelDecorator", decorate),
        (parallel_decorator.ParallelDecorator, "setup_distributed_env", decorate),
        (flowspec, "ParallelUBF", spin),
    ],
)
def test_what_a_gang_needs_is_named_with_the_version(owner, name, use, datastore, tmp_path, take_away, monkeypatch):
    use(datastore, tmp_path)
    if use is spin:
        use = lambda *_: decorators._make_gang_of_one(SimpleNamespace(_parallel_ubf_iter=Task().ubf_iter))  # noqa: E731
    take_away(owner, name)
    with pytest.raises(TorchrunError) as error:
        use(datastore, tmp_path)
    assert f".{name} of Metaflow, which is not there" in str(error.value)
    assert f"this is {metaflow.__version__}. Install a newer metaflow-torchrun" in str(error.value)


# --- when Metaflow itself is imported -------------------------------------------------------------

# All that our modules use which `import metaflow` loads, and two names that a gang can't do without.
AT_IMPORT = [
    *["MetaflowException", "MetaflowCard", "ParallelDecorator", "StepDecorator", "UBF_CONTROL", "UNPACK_KEY"],
    *["KUBERNETES_SANDBOX_INIT_SCRIPT", "SPIN_ALLOWED_DECORATORS", "from_conf", "RELOAD_POLICY_ONCHANGE"],
]
IMPORT = """
import metaflow
try:
    metaflow.torchrun(metaflow.step(lambda self: None))
except metaflow.TorchrunError as error:
    print(error)
"""


def test_metaflow_can_be_imported_whatever_it_renames():
    env = {**os.environ, "PYTHONPATH": str(RENAMING), "RENAMED": " ".join(AT_IMPORT)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "@torchrun needs metaflow.plugins.parallel_decorator.ParallelDecorator of Metaflow" in done.stdout


REGISTERING = Path(extension.__file__).parents[2]


def test_settings_that_are_read_in_another_way_stay(monkeypatch):
    monkeypatch.setattr(metaflow_config_funcs, "from_conf", lambda name: None)
    runpy.run_path(str(REGISTERING / "config" / "mfextinit_torchrun.py"))


def test_without_metaflows_copies_of_packages_there_are_no_commands(monkeypatch):
    def find_spec(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert runpy.run_path(str(REGISTERING / "plugins" / "mfextinit_torchrun.py"))["CLIS_DESC"] == []
