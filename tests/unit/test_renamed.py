"""What is left when a private name of Metaflow's is gone: its owner is the real one, and loses one name at a time."""

import ast
import importlib.util
import os
import pickle
import re
import runpy
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import metaflow
import pytest
from flow_runs import LEFT_OUT_TOGETHER, RENAMING
from metaflow import FlowSpec, current, flowspec, lint, metaflow_config_funcs, plugins, step, torchrun
from metaflow import cli as metaflow_cli
from metaflow import datastore as metaflow_datastore
from metaflow.datastore import FlowDataStore
from metaflow.datastore import exceptions as datastore_exceptions
from metaflow.datastore.task_datastore import TaskDataStore
from metaflow.exception import MetaflowException
from metaflow.graph import DAGNode
from metaflow.metaflow_current import Parallel
from metaflow.plugins import parallel_decorator
from metaflow.plugins.cards import card_creator, card_modules
from metaflow.plugins.cards.card_creator import CardCreator, CardProcessManager
from metaflow.plugins.cards.component_serializer import CardComponentCollector, CardComponentManager, ComponentStore
from metaflow.plugins.datastores import local_storage
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins import torchrun as extension
from metaflow_extensions.torchrun.plugins.torchrun import decorator as decorators
from metaflow_extensions.torchrun.plugins.torchrun.channel.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.compat import cards, cli, graph, renamed, steps, stored
from metaflow_extensions.torchrun.plugins.torchrun.compat.datastore import DatastoreValues, save_log, values_at
from metaflow_extensions.torchrun.plugins.torchrun.compat.jobs import job_of
from metaflow_extensions.torchrun.plugins.torchrun.compat.steps import SameInterpreter
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import GangError, TorchrunError
from metaflow_extensions.torchrun.plugins.torchrun.features.functions import function_worker
from metaflow_extensions.torchrun.plugins.torchrun.features.warm import spare
from metaflow_extensions.torchrun.plugins.torchrun.launch.transfer import Step, Transfer
from metaflow_extensions.torchrun.plugins.torchrun.logs.task_log import TaskLog
from metaflow_extensions.torchrun.plugins.torchrun.outputs import Outputs
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.show import live_card
from metaflow_extensions.torchrun.plugins.torchrun.task import report as node_report
from metaflow_extensions.torchrun.plugins.torchrun.task import submit_checks
from metaflow_extensions.torchrun.plugins.torchrun.task.task_gang import TaskGang

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
            return
        module = f"{owner.__name__}.{name}"
        if module in sys.modules:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delattr(owner, name)

    return take


def rows(table):
    """Return the rows of a table that has the names, in one text, by their owner."""
    return [(owner, name) for owner, names in table.items() for name in names.split()]


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


OF_CARDS = {
    CardComponentCollector: "get _card_component_store",
    CardComponentManager: "_card_creator_args _card_creator _latest_user_data _card_proc _last_layout_change "
    "_render_seq _last_render components refresh",
    ComponentStore: "layout_last_changed_on",
    CardProcessManager: "_get_card_process",
    card_creator: "CardProcessManager",
    CardCreator: "create",
}


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


@pytest.mark.parametrize(("owner", "name"), [*rows(OF_CARDS), (None, "none")], ids=str)
@pytest.mark.parametrize("error", [GangError("the cause"), None], ids=["its own error", "well"])
def test_without_a_name_of_its_cards_a_gang_ends_as_its_step_does(owner, name, error, gang, take_away, capfd):
    with pytest.raises(GangError) if error else nullcontext() as caught:
        run_step(gang, (lambda: take_away(owner, name)) if owner else (lambda: None), error)
    assert error is None or caught.value is error
    gang.leave(None)
    said = left_out(capfd)
    least, most = bool(owner and error), 2 if owner else 0  # one line for the live cards, one for the last
    assert least <= len(said) <= most, said
    assert all(f"this is {metaflow.__version__} (" in line and name in line for line in said)


@pytest.mark.parametrize("name", STORING)
def test_without_a_name_of_its_results_the_others_are_still_watched(name, gang, datastore, take_away, capfd):
    results = datastore.get_task_datastore("1", "train", "2", attempt=0, mode="w")
    take_away(TaskDataStore, name)
    gang.watch_storing(results)
    (line,) = left_out(capfd)
    assert "results can't be stored" in line
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


OF_SUBMISSION = {
    DAGNode: "out_funcs parallel_foreach num_parallel split_parents",
    CliArgs: "task command_options env",
    FlowDataStore: "metadata nothing",
    Task: "ubf_iter",
    Timeout: "secs",
}
# By how many conveniences a name is looked at, where it is not one.
LOOKED_AT = {"metadata": 0, "nothing": 0, "out_funcs": 2, "parallel_foreach": 2, "env": 2}


@pytest.mark.parametrize(("owner", "name"), rows(OF_SUBMISSION))
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
    assert len(left_out(capfd)) == LOOKED_AT.get(name, 1)


def test_an_environment_is_asked_whatever_metaflow_asks():
    asked = []
    real = SimpleNamespace(executable=lambda *args, **options: asked.append((args, options)) or "python", colour="red")
    same = SameInterpreter(SimpleNamespace(base_env=real))
    assert same.executable("train", default=None, kind="new") == sys.executable
    assert asked == [(("train",), {"default": None, "kind": "new"})]
    assert same.colour == "red"
    assert getattr(same, "base_env", same) is same, "else the base environment would be asked itself"


def test_metaflows_printing_may_take_more_than_the_error(monkeypatch):
    printed, error = [], MetaflowException("no")
    for name in ("print_metaflow_exception", "print_unknown_exception"):
        monkeypatch.setattr(metaflow_cli, name, lambda *args, **options: printed.append((args, options)))
    node_report.print_errors_ourselves(in_task=False)
    metaflow_cli.print_metaflow_exception(error, 1, colour="red")
    assert printed == [((error, 1), {"colour": "red"})]


def test_a_worker_whose_current_can_not_be_filled_goes_on(capfd):
    module = SimpleNamespace(current=SimpleNamespace())  # it has no `_update_env`
    function_worker.tell_current(module, pickle.dumps({"state": {}, "values": {}, "withheld": []}))
    assert "`current` in the workers" in "".join(left_out(capfd))


# --- what a gang can't do without -----------------------------------------------------------------


def store_value(datastore):
    values = DatastoreValues(datastore)
    list(values.load([values.save(b"value")]))


def read_outputs(datastore):
    store_list = DatastoreValues(datastore)
    key = store_list.save(b'{"files": [], "left_out": {}}')
    list(Outputs(store_list.address, {0: (key, 0, 0)}))


class GangFlow:
    _parallel_ubf_iter = flowspec.ParallelUBF(2)


def make_spin(datastore):
    """Have a step of `spin` made one of one node, whether or not Metaflow has its class."""
    ubf_iter = flowspec.ParallelUBF(2) if hasattr(flowspec, "ParallelUBF") else Task().ubf_iter
    decorators._make_gang_of_one(SimpleNamespace(_parallel_ubf_iter=ubf_iter))


# What is done, and the names without which it can't be.
NEEDED = [
    (
        lambda datastore: Registry(datastore, "1", "train", "2", 0),
        {FlowDataStore: "get_task_datastore", TaskDataStore: "load_metadata save_metadata"},
    ),
    (store_value, {FlowDataStore: "save_data load_data"}),
    (read_outputs, {metaflow_datastore: "FlowDataStore", plugins: "DATASTORES"}),
    (
        lambda _: TorchrunDecorator(),
        {parallel_decorator: "ParallelDecorator", parallel_decorator.ParallelDecorator: "setup_distributed_env"},
    ),
    (make_spin, {flowspec: "ParallelUBF"}),
    (
        lambda _: steps.num_parallel(GangFlow()),
        {GangFlow: "_parallel_ubf_iter", flowspec.ParallelUBF: "num_parallel"},
    ),
    (lambda _: steps.control_task_of(Parallel("127.0.0.1", 1, 0, None)), {Parallel: "control_task_id"}),
    (lambda _: steps.offer("torch", None), {type(current): "_update_env"}),
    (stored.Storage, {FlowDataStore: "_storage_impl"}),
    (
        lambda datastore: stored.last_attempt(datastore, ("1", "train", "none")),
        {datastore_exceptions: "DataException"},
    ),
    (
        lambda datastore: list(values_at(DatastoreValues(datastore).address)),
        {LocalStorage: "get_datastore_root_from_config"},
    ),
]
NEEDED_ROWS = [(*row, use) for use, table in NEEDED for row in rows(table)]


@pytest.mark.parametrize(("owner", "name", "use"), NEEDED_ROWS)
def test_what_a_gang_needs_is_named_with_the_version(owner, name, use, datastore, take_away):
    use(datastore)
    take_away(owner, name)
    with pytest.raises(TorchrunError) as error:
        use(datastore)
    assert f".{name} of Metaflow, which is not there" in str(error.value)
    assert f"this is {metaflow.__version__}. Install a newer metaflow-torchrun" in str(error.value)


# --- what a command, a card or a check can do without -----------------------------------------------


def save_task_log(datastore):
    TaskLog(partial(save_log, datastore, ("1", "train", "2", 0)), {"MFLOG_STDOUT": __file__}).save(10)


def datastore_of_card(_):
    return stored.datastore_of_card("GangFlow", {})


ALONE = [
    (TaskDataStore, "save_logs", save_task_log, None),
    (plugins, "DATASTORES", datastore_of_card, None),
    (metaflow_datastore, "FlowDataStore", datastore_of_card, None),
    (local_storage, "LocalStorage", lambda _: stored.latest_run("GangFlow"), None),
    (lint, "linter", lambda _: graph.check_first(print), None),
    (lint.FlowLinter, "_checks", lambda _: graph.check_last(print), None),
    (metaflow_cli, "print_metaflow_exception", lambda _: cli.print_errors_by(print), None),
    (metaflow._vendor, "click", lambda _: graph.ignored_by_with("torchrun"), []),
]


@pytest.mark.parametrize(("owner", "name", "use", "left"), ALONE)
def test_what_is_left_out_alone_is_told_once(owner, name, use, left, datastore, take_away, monkeypatch, capfd):
    # The other printer is replaced, and is given back to the tests that come after this one.
    monkeypatch.setattr(metaflow_cli, "print_unknown_exception", metaflow_cli.print_unknown_exception)
    take_away(owner, name)
    assert [use(datastore), use(datastore)] == [left, left]
    assert len(left_out(capfd)) == 1


OF_STARTED_CARDS = {CardCreator: "_run_command", CardProcessManager: "_register_card_process"}


@pytest.mark.parametrize(("owner", "name"), rows(OF_STARTED_CARDS))
def test_without_a_name_of_their_processes_metaflow_starts_its_cards(owner, name, take_away):
    card = SimpleNamespace(_card_creator=CardCreator([], None))
    take_away(owner, name)
    cards.start_by(card, pytest.fail)
    assert "_run_command" not in vars(card._card_creator)


OF_ERROR_CARDS = {card_modules: "basic chevron"}


@pytest.mark.parametrize(("owner", "name"), rows(OF_ERROR_CARDS))
def test_without_the_frame_of_its_cards_metaflow_shows_the_error(owner, name, take_away):
    assert "Flow/1/train/2" in cards.page("Flow/1/train/2", {}, "", is_final=True)
    take_away(owner, name)
    with pytest.raises((ImportError, AttributeError)):
        cards.page("Flow/1/train/2", {}, "", is_final=True)


class Jobs:
    """Stands for a job of either backend, and for its client."""

    _name = _namespace = _pod_name = _id = "a-job"

    def get(self):
        return self

    def CoreV1Api(self):  # noqa: N802
        return self


class Kubernetes:
    def wait(self):
        raise RuntimeError("the job has failed")


class Batch(Kubernetes):
    pass


Jobs._client = Kubernetes._job = Batch.job = Jobs()
OF_JOBS = [
    (Kubernetes, {Jobs: "_client _name _namespace _pod_name", Kubernetes: "_job"}),
    (Batch, {Jobs: "_client _id", Batch: "job"}),
]


@pytest.mark.parametrize(("kind", "owner", "name"), [(kind, *row) for kind, table in OF_JOBS for row in rows(table)])
def test_without_a_name_of_its_job_nothing_is_said_of_it(kind, owner, name, take_away):
    with pytest.raises(RuntimeError) as error:
        kind().wait()
    assert job_of(error.value) is not None
    take_away(owner, name)
    assert job_of(error.value) is None


# --- CPython --------------------------------------------------------------------------------------

NAMES_OF_PYTHON = {"_current_frames": sys, "_register_atexit": threading, "_run_module_as_main": runpy}


def test_without_a_name_of_pythons_transfers_go_on_and_a_spare_refuses(datastore, take_away):
    for name, owner in NAMES_OF_PYTHON.items():
        take_away(owner, name)
    assert DatastoreValues(datastore).trouble() is None
    Transfer(DatastoreValues(datastore), "stores", [Step("a value", dict, 1.0)]).give_up()
    with pytest.raises(AttributeError):  # which `spare.main` tells as the reason for a cold start
        spare._program([sys.executable, "-u", "-m", "json.tool"])


# --- when Metaflow itself is imported -------------------------------------------------------------

# All that our modules use which `import metaflow` loads, and two names that a gang can't do without.
AT_IMPORT = """
MetaflowException MetaflowCard ParallelDecorator StepDecorator UBF_CONTROL UNPACK_KEY TimeoutException KUBERNETES_PORT
KUBERNETES_SANDBOX_INIT_SCRIPT SPIN_ALLOWED_DECORATORS from_conf RELOAD_POLICY_ONCHANGE
"""
IMPORT = """
import metaflow
try:
    metaflow.torchrun(metaflow.step(lambda self: None))
except metaflow.TorchrunError as error:
    print(error)
"""


def test_metaflow_can_be_imported_whatever_it_renames():
    env = {**os.environ, "PYTHONPATH": str(RENAMING), "RENAMED": " ".join(AT_IMPORT.split())}
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


# --- the table of all ------------------------------------------------------------------------------

# Names in frames that are looked for, of artifacts that are read where there are any, and that are only set.
HARMLESS = {"_one_boto_op", "_send_request", "_jobset", "_task_ok", "_exception"}
HARMLESS |= {"_control_mapper_tasks", "_control_task_is_mapper_zero"}
# ``test_worker_hooks.py`` takes these of torch and Accelerate away.
ELSEWHERE = {"_backend", "_default_pg_init_method", "_get_sequence_nr", "_shared_state"}
TABLES = [OF_CARDS, OF_SUBMISSION, OF_STARTED_CARDS, OF_ERROR_CARDS, *(table for _, table in [*NEEDED, *OF_JOBS])]
ROWS = {name for table in TABLES for _, name in rows(table)} | {row[1] for row in ALONE}
ROWS |= {*AT_IMPORT.split(), *LEFT_OUT_TOGETHER.split(), *NAMES_OF_PYTHON, *HARMLESS, *ELSEWHERE}
FOLDER = Path(extension.__file__).parent
TREES = {path.relative_to(FOLDER): ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py")}
SCRIPTS = ("worker", "features", "launch/transfer.py")
PROMISED = {"_asdict", "_replace", "_exit", "current"}


def names_that_are_ours():
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name


OURS = {*names_that_are_ours()} | PROMISED


def private_names(tree):
    """Yield what a module uses that others have not promised: imported from inside Metaflow, or with a `_` before it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("metaflow."):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("known", "need"):
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"_[a-z]\w+(?<!_)", name):
            yield name


@pytest.mark.parametrize("path", sorted(TREES), ids=str)
def test_a_private_name_stands_in_compat_and_in_a_table(path):
    found = {name for name in private_names(TREES[path]) if name not in OURS}
    if path.parts[0] != "compat" and not str(path).startswith(SCRIPTS):
        assert found <= {"MetaflowException"}, "they belong into compat/"
    assert found - {"_open", "_first_to_open"} <= ROWS, "take them away in a test"
