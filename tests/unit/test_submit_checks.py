"""What is refused at submit time, and what is let pass."""

from types import SimpleNamespace

import pytest
from metaflow import FlowSpec, batch, step, torchrun

from metaflow_extensions.torchrun.plugins.torchrun.compat import graph
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.submit.checks import Submission

CATCH = {"catch": {"var": "failure"}}
BATCH = {"batch": {"queue": "q"}}
KUBERNETES = {"kubernetes": {}}


class Flow(FlowSpec):
    """A gang whose size only the run knows."""

    @step
    def start(self):
        self.names = [1, 2]
        self.next(self.train, num_parallel=len(self.names))

    @batch(queue="q")
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


def submission(decorators, metadata_type="local", **attributes):
    """Return the checks of the flow's gang as if it had these decorators."""
    written = [SimpleNamespace(name=name, attributes=attributes) for name, attributes in decorators.items()]
    flow = SimpleNamespace(train=SimpleNamespace(decorators=written))
    return Submission(flow, Flow._graph, "train", parse_settings(attributes, "train"), metadata_type)


def refusal(check, *arguments):
    with pytest.raises(TorchrunConfigError) as error:
        check(*arguments)
    return error.value.message


@pytest.mark.parametrize("deployed", ["by the command", "in its task"])
def test_fewer_nodes_are_refused_on_argo(monkeypatch, deployed):
    monkeypatch.setattr(graph.sys, "argv", ["flow.py", "run"])
    on_argo = {**KUBERNETES, "argo_workflows_internal": {}}
    if deployed == "by the command":
        on_argo = KUBERNETES
        graph.sys.argv[1:] = ["argo-workflows", "create"]
    given = {"spare_nodes": 1, "max_restarts": 1}
    submission(on_argo, **given).check(4)
    submission(on_argo, **given, min_nodes=3).check(4)
    for count in (4, None):
        said = refusal(submission(on_argo, **given, min_nodes=2).check, count)
        assert "@torchrun(min_nodes=2) does not work on Argo Workflows: its join needs the results of all nodes" in said


@pytest.mark.parametrize(
    ("words", "is_on_argo"),
    [
        ("--with=kubernetes argo-workflows --name x create --max-workers 3", True),
        ("--environment pypi argo-workflows create", True),
        ("--tag argo-workflows run", False),
        ("run --tag argo-workflows", False),
    ],
)
def test_which_commands_deploy_on_argo(words, is_on_argo):
    assert graph.is_on_argo([], ["flow.py", *words.split()]) is is_on_argo


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"spare_nodes": 3, "max_restarts": 1}, "spare_nodes=3) leaves no node to train, since num_parallel is 3"),
        ({"spare_nodes": 1, "min_nodes": 3, "max_restarts": 1}, "min_nodes=3) is more than the 2 nodes that train"),
        ({"spare_nodes": 1}, "@torchrun(spare_nodes=1) needs max_restarts"),
        ({"min_nodes": 2}, "@torchrun(min_nodes=2) needs max_restarts"),
        (
            {"min_nodes": 2, "max_restarts": 1, "restart_on": "user"},
            "@torchrun(min_nodes=2) is of no use, since restart_on has neither",
        ),
    ],
)
def test_spares_and_fewer_nodes_that_can_not_be_used_are_refused(given, words):
    assert words in refusal(submission({}, **given).check, 3)


@pytest.mark.parametrize("category", ["node_lost", "preempted"])
def test_restarts_for_lost_nodes_need_other_nodes_on_batch(category):
    for where in ({}, KUBERNETES):
        submission(where, restart_on=["user", category]).check()
    said = refusal(submission(BATCH, restart_on=["user", category]).check)
    assert f"@torchrun(restart_on=['{category}']) needs spare_nodes or min_nodes on @batch" in said
    assert f"or remove {category} from restart_on" in said
    submission(BATCH, max_restarts=1).check()


@pytest.mark.parametrize(
    ("num_nodes", "decorators", "metadata_type"),
    [
        (2, BATCH, "service"),
        (2, KUBERNETES, "local"),
        (1, BATCH, "local"),  # it waits for nobody
        (None, BATCH, "local"),  # asked again when it is known
        (2, {**BATCH, **CATCH, **KUBERNETES}, "spin"),  # it runs here, and alone
    ],
)
def test_what_sees_its_end_is_fine(num_nodes, decorators, metadata_type):
    submission(decorators, metadata_type).check(num_nodes, is_run=True)


@pytest.fixture
def decorator():
    """Return a decorator as `step_init` leaves it, at a step that is meant for AWS Batch."""
    decorator = TorchrunDecorator()
    decorator._submission = Submission(Flow(use_cli=False), Flow._graph, "train", parse_settings({}, "train"), "local")
    decorator._siblings = []
    return decorator


def start(decorator, num_nodes):
    """Do what Metaflow does before it starts a gang; return what the decorator made of it."""
    iterator = SimpleNamespace(num_parallel=num_nodes)
    cli_args = SimpleNamespace(task=SimpleNamespace(ubf_iter=iterator), command_options={}, env={})
    decorator.runtime_step_cli(cli_args, 0, 0, "ubf_control")
    return cli_args


def test_the_number_of_nodes_is_checked_when_the_run_tells_it(decorator):
    decorator._submission.check(is_run=True)
    start(decorator, 1)
    assert "gang of 3 nodes" in refusal(start, decorator, 3)


@pytest.mark.parametrize(
    ("beside", "num_nodes", "told"), [("kubernetes", 1, None), ("kubernetes", 2, "2"), ("batch", 1, "1")]
)
def test_a_gang_of_one_is_an_ordinary_pod(beside, num_nodes, told, decorator):
    """Metaflow 2.19 refuses a job set of one."""
    decorator._submission = submission({})
    decorator._siblings = [SimpleNamespace(name=beside), decorator]
    cli_args = start(decorator, num_nodes)
    assert cli_args.command_options.get("num-parallel") == told
    # What lets the task see SIGTERM; only a pod's shell knows it.
    assert ("METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT" in cli_args.env) is (beside == "kubernetes")
