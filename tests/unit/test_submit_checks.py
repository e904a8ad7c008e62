"""What is refused at submit time, and what is let pass."""

from types import SimpleNamespace

import pytest
from metaflow import FlowSpec, batch, parallel, step, torchrun

from metaflow_extensions.torchrun.plugins.torchrun.border.submit_checks import (
    GangStep,
    Submission,
    gang_step,
    refuse_on_batch,
    refuse_on_kubernetes,
)
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError

STEP = GangStep("train", 2, None)
IN_FOREACH = GangStep("train", 2, "items")
CATCH = {"catch": {"var": "failure"}}
BATCH = {"batch": {"queue": "q"}}


class Plain(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

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


class Nested(FlowSpec):
    """A foreach around a gang, and a gang whose size only the run knows."""

    @step
    def start(self):
        self.items = [1, 2]
        self.next(self.item, foreach="items")

    @step
    def item(self):
        self.next(self.train, num_parallel=3)

    @parallel
    @step
    def train(self):
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.merge)

    @step
    def merge(self, inputs):
        self.next(self.size)

    @step
    def size(self):
        self.nodes = 2
        self.next(self.again, num_parallel=self.nodes)

    @parallel
    @step
    def again(self):
        self.next(self.last)

    @step
    def last(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


def refusal(check, *arguments):
    with pytest.raises(TorchrunConfigError) as error:
        check(*arguments)
    return error.value.message


def test_the_graph_tells_what_a_gang_is():
    assert gang_step(Plain._graph, "train") == GangStep("train", 2, None)
    assert gang_step(Nested._graph, "train") == GangStep("train", 3, "start")
    assert gang_step(Nested._graph, "again") == GangStep("again", None, None)
    for name in ("start", "item", "join", "merge", "size", "end"):
        assert gang_step(Nested._graph, name) is None


KUBERNETES = {"kubernetes": {}}


def port(number):
    return {"kubernetes": {"port": number}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({**CATCH, **KUBERNETES}, None, None), ["Step train", "@catch(var='failure')", "TorchrunError", "@retry"]),
        ((port(8080), 29500, None), ["Step train: @kubernetes(port=8080) and @torchrun(master_port=29500) disagree"]),
        ((port("8080"), 29500, None), ["the same number in both"]),
        ((port(8081), 29500, "8080"), ["port=8081"]),
    ],
)
def test_what_can_not_work_on_kubernetes_is_refused(arguments, words):
    told = refusal(refuse_on_kubernetes, STEP, *arguments)
    assert [word for word in words if word not in told] == []


@pytest.mark.parametrize(
    ("decorators", "master_port", "site_port"),
    [
        ({**CATCH, **BATCH}, None, None),
        ({**KUBERNETES, "retry": {}}, None, None),
        (port(None), 29500, None),
        (port(29500), None, None),
        (port(29500), 29500, None),
        (port("29500"), 29500, None),
        (port("8080"), 29500, "8080"),  # METAFLOW_KUBERNETES_PORT; the step says nothing of it
        (port(8080), 29500, "8080"),
    ],
)
def test_ports_that_agree_and_catch_elsewhere_are_fine(decorators, master_port, site_port):
    refuse_on_kubernetes(STEP, decorators, master_port, site_port)


@pytest.mark.parametrize(
    ("gang", "metadata_type", "words"),
    [
        (STEP, "local", ["--metadata=local", "600 s", "--metadata=service"]),
        (IN_FOREACH, "local", ["foreach of step items", "exactly 2 finished tasks", "@kubernetes"]),
        (IN_FOREACH, "service", ["foreach of step items"]),
    ],
)
def test_what_would_never_see_its_end_on_batch_is_refused(gang, metadata_type, words):
    told = refusal(refuse_on_batch, gang, 2, BATCH, metadata_type)
    assert told.startswith("Step train, a gang of 2 nodes with @batch(queue='q'),")
    assert [word for word in words if word not in told] == []


@pytest.mark.parametrize(
    ("gang", "num_nodes", "decorators", "metadata_type"),
    [
        (STEP, 2, BATCH, "service"),
        (IN_FOREACH, 2, KUBERNETES, "local"),
        (STEP, 2, {}, "local"),
        (IN_FOREACH, 1, BATCH, "local"),  # it waits for nobody
        (STEP, None, BATCH, "local"),  # asked again when it is known
    ],
)
def test_gangs_that_see_their_end_are_fine(gang, num_nodes, decorators, metadata_type):
    refuse_on_batch(gang, num_nodes, decorators, metadata_type)


def start(decorator, num_nodes):
    """Do what Metaflow does before it starts a gang; return what the decorator made of it."""
    iterator = SimpleNamespace(num_parallel=num_nodes)
    cli_args = SimpleNamespace(task=SimpleNamespace(ubf_iter=iterator), command_options={}, env={})
    decorator.runtime_step_cli(cli_args, 0, 0, "ubf_control")
    return cli_args


def test_the_number_of_nodes_is_checked_when_the_run_tells_it():
    flow, decorator = Plain(use_cli=False), TorchrunDecorator()
    submission = decorator._submission = Submission(flow, flow._graph, "train", None, "local")
    assert "gang of 2 nodes" in refusal(submission.check_batch)
    start(decorator, 1)
    assert "gang of 3 nodes" in refusal(start, decorator, 3)


@pytest.mark.parametrize(
    ("beside", "num_nodes", "told"),
    [("kubernetes", 1, None), ("kubernetes", 2, "2"), ("batch", 1, "1")],
)
def test_a_gang_of_one_is_an_ordinary_pod(beside, num_nodes, told):
    """Metaflow 2.19 refuses a job set of one."""
    decorator = TorchrunDecorator()
    decorator._siblings = [SimpleNamespace(name=beside), decorator]
    cli_args = start(decorator, num_nodes)
    assert cli_args.command_options.get("num-parallel") == told
    # What lets the task see SIGTERM; only a pod's shell knows it.
    assert ("METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT" in cli_args.env) is (beside == "kubernetes")


def test_a_step_that_is_no_gang_is_not_checked():
    flow = Plain(use_cli=False)
    submission = Submission(flow, flow._graph, "join", None, "local")
    submission.check_kubernetes()
    submission.check_batch(3)
