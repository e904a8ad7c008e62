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


@pytest.mark.parametrize(("owner", "name"), [*NAMES_OF_CARDS, (None, "none")], ids=str)
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


USES = {
    "registry": lambda datastore: Registry(datastore, "1", "train", "2", 0),
    "store a value": store_value,
    "read outputs": read_outputs,
    "decorate": lambda _: TorchrunDecorator(),
    "spin": make_spin,
    "count nodes": lambda _: steps.num_parallel(GangFlow()),
    "ask for the control task": lambda _: steps.control_task_of(Parallel("127.0.0.1", 1, 0, None)),
    "offer torch": lambda _: steps.offer("torch", None),
    "read stored": stored.Storage,
    "find an attempt": lambda datastore: stored.last_attempt(datastore, ("1", "train", "none")),
    "find stores": lambda datastore: list(values_at(DatastoreValues(datastore).address)),
}
NEEDED = [
    (FlowDataStore, "get_task_datastore", "registry"),
    (TaskDataStore, "load_metadata", "registry"),
    (TaskDataStore, "save_metadata", "registry"),
    (FlowDataStore, "save_data", "store a value"),
    (FlowDataStore, "load_data", "store a value"),
    (metaflow_datastore, "FlowDataStore", "read outputs"),
    (plugins, "DATASTORES", "read outputs"),
    (parallel_decorator, "ParallelDecorator", "decorate"),
    (parallel_decorator.ParallelDecorator, "setup_distributed_env", "decorate"),
    (flowspec, "ParallelUBF", "spin"),
    (FlowDataStore, "_storage_impl", "read stored"),
    (LocalStorage, "get_datastore_root_from_config", "find stores"),
    (datastore_exceptions, "DataException", "find an attempt"),
    (GangFlow, "_parallel_ubf_iter", "count nodes"),
    (flowspec.ParallelUBF, "num_parallel", "count nodes"),
    (Parallel, "control_task_id", "ask for the control task"),
    (type(current), "_update_env", "offer torch"),
]


@pytest.mark.parametrize(("owner", "name", "use"), NEEDED)
def test_what_a_gang_needs_is_named_with_the_version(owner, name, use, datastore, take_away):
    USES[use](datastore)
    take_away(owner, name)
    with pytest.raises(TorchrunError) as error:
        USES[use](datastore)
    assert f".{name} of Metaflow, which is not there" in str(error.value)
    assert f"this is {metaflow.__version__}. Install a newer metaflow-torchrun" in str(error.value)


# --- what a command, a card or a check can do without -----------------------------------------------


def datastore_of_card():
    return stored.datastore_of_card("GangFlow", {})


ALONE = [
    (plugins, "DATASTORES", datastore_of_card),
    (metaflow_datastore, "FlowDataStore", datastore_of_card),
    (local_storage, "LocalStorage", lambda: stored.latest_run("GangFlow")),
    (lint, "linter", lambda: graph.check_first(print)),
    (lint.FlowLinter, "_checks", lambda: graph.check_last(print)),
    (metaflow_cli, "print_metaflow_exception", lambda: cli.print_errors_by(print)),
]


@pytest.mark.parametrize(("owner", "name", "use"), ALONE)
def test_what_is_left_out_alone_is_told_once(owner, name, use, take_away, monkeypatch, capfd):
    # The other printer is replaced, and is given back to the tests that come after this one.
    monkeypatch.setattr(metaflow_cli, "print_unknown_exception", metaflow_cli.print_unknown_exception)
    take_away(owner, name)
    assert use() is use() is None
    assert len(left_out(capfd)) == 1


def test_without_metaflows_click_no_option_is_known(take_away, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "metaflow._vendor.click", None)
    take_away(metaflow._vendor, "click")
    assert graph.ignored_by_with("torchrun") == []
    assert len(left_out(capfd)) == 1


OF_STARTED_CARDS = [(CardCreator, "_run_command"), (CardProcessManager, "_register_card_process")]


@pytest.mark.parametrize(("owner", "name"), OF_STARTED_CARDS)
def test_without_a_name_of_their_processes_metaflow_starts_its_cards(owner, name, take_away):
    card = SimpleNamespace(_card_creator=CardCreator([], None))
    take_away(owner, name)
    cards.start_by(card, pytest.fail)
    assert "_run_command" not in vars(card._card_creator)


OF_ERROR_CARDS = [(card_modules, "basic"), (card_modules, "chevron")]


@pytest.mark.parametrize(("owner", "name"), OF_ERROR_CARDS)
def test_without_the_frame_of_its_cards_metaflow_shows_the_error(owner, name, take_away, monkeypatch):
    assert "Flow/1/train/2" in cards.page("Flow/1/train/2", {}, "", is_final=True)
    monkeypatch.setitem(sys.modules, f"{owner.__name__}.{name}", None)
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
NAMES_OF_JOBS = [
    *[(Kubernetes, Jobs, name) for name in ("_client", "_name", "_namespace", "_pod_name")],
    *[(Kubernetes, Kubernetes, "_job"), (Batch, Batch, "job"), (Batch, Jobs, "_client"), (Batch, Jobs, "_id")],
]


@pytest.mark.parametrize(("kind", "owner", "name"), NAMES_OF_JOBS)
def test_without_a_name_of_its_job_nothing_is_said_of_it(kind, owner, name, take_away):
    with pytest.raises(RuntimeError) as error:
        kind().wait()
    assert job_of(error.value) is not None
    take_away(owner, name)
    assert job_of(error.value) is None


# --- CPython --------------------------------------------------------------------------------------

NAMES_OF_PYTHON = {"_current_frames", "_register_atexit", "_run_module_as_main"}


def test_without_a_name_of_pythons_transfers_go_on_and_a_spare_refuses(datastore, take_away):
    take_away(sys, "_current_frames")
    take_away(threading, "_register_atexit")
    take_away(runpy, "_run_module_as_main")
    assert DatastoreValues(datastore).trouble() is None
    Transfer(DatastoreValues(datastore), "stores", [Step("a value", dict, 1.0)]).give_up()
    with pytest.raises(AttributeError):  # which `spare.main` tells as the reason for a cold start
        spare._program([sys.executable, "-u", "-m", "json.tool"])


# --- when Metaflow itself is imported -------------------------------------------------------------

# All that our modules use which `import metaflow` loads, and two names that a gang can't do without.
AT_IMPORT = [
    *["MetaflowException", "MetaflowCard", "ParallelDecorator", "StepDecorator", "UBF_CONTROL", "UNPACK_KEY"],
    *["TimeoutException", "KUBERNETES_PORT"],
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


# --- the table of all ------------------------------------------------------------------------------

# Names in frames that are looked for, of artifacts that are read where there are any, and that are only set.
HARMLESS = {"_one_boto_op", "_send_request", "_jobset", "_task_ok", "_exception"}
HARMLESS |= {"_control_mapper_tasks", "_control_task_is_mapper_zero"}
# ``test_worker_hooks.py`` takes these of torch and Accelerate away.
ELSEWHERE = {"_backend", "_default_pg_init_method", "_get_sequence_nr", "_shared_state"}
TABLES = (NAMES_OF_CARDS, NAMES_OF_JOBS, NEEDED, ALONE, OF_STARTED_CARDS, OF_ERROR_CARDS)
ROWS = {next(each for each in row if isinstance(each, str)) for table in TABLES for row in table}
ROWS |= {*AT_IMPORT, *LEFT_OUT_TOGETHER.split(), *NAMES_OF_PYTHON, *HARMLESS, *ELSEWHERE, "click"}
FOLDER = Path(extension.__file__).parent
TREES = {path.relative_to(FOLDER): ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py")}
SCRIPTS = ("worker", "features", "launch/transfer.py")
PROMISED = {"_asdict", "_replace", "_exit", "current"}


def names_that_are_ours():
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


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
