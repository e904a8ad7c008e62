"""What is refused at submit time, and what is let pass."""

from types import SimpleNamespace

import pytest
from metaflow import FlowSpec, batch, parallel, step, torchrun

from metaflow_extensions.torchrun.plugins.torchrun import submit_checks
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.submit_checks import (
    Gang,
    Submission,
    gang_at,
    machines_of_queue,
    refuse_fargate_attributes,
    refuse_fargate_queue,
    refuse_on_batch,
    refuse_on_kubernetes,
)

GANG = Gang("train", 2, None)
IN_FOREACH = Gang("train", 2, "items")
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
    assert gang_at(Plain._graph, "train") == Gang("train", 2, None)
    assert gang_at(Nested._graph, "train") == Gang("train", 3, "start")
    assert gang_at(Nested._graph, "again") == Gang("again", None, None)
    for name in ("start", "item", "join", "merge", "size", "end"):
        assert gang_at(Nested._graph, name) is None


def test_catch_on_kubernetes_is_refused():
    told = refusal(refuse_on_kubernetes, GANG, {**CATCH, "torchrun": {}, "kubernetes": {}}, None, None)
    for word in ("Step train", "@catch(var='failure')", "@kubernetes", "MF_MASTER_ADDR", "TorchrunError", "@retry"):
        assert word in told


@pytest.mark.parametrize("decorators", [CATCH, {**CATCH, **BATCH}, {"kubernetes": {}, "retry": {}}, {}])
def test_catch_elsewhere_and_kubernetes_without_catch_are_fine(decorators):
    refuse_on_kubernetes(GANG, decorators, None, None)


@pytest.mark.parametrize(("port", "master_port"), [(8080, 29500), ("8080", 29500)])
def test_ports_that_disagree_are_refused(port, master_port):
    told = refusal(refuse_on_kubernetes, GANG, {"kubernetes": {"port": port}}, master_port, None)
    assert "Step train: @kubernetes(port=8080) and @torchrun(master_port=29500) disagree" in told
    assert "the same number in both" in told


@pytest.mark.parametrize(
    ("port", "master_port", "site_port"),
    [
        (None, 29500, None),
        (29500, None, None),
        (29500, 29500, None),
        ("29500", 29500, None),
        ("8080", 29500, "8080"),  # METAFLOW_KUBERNETES_PORT; the step says nothing of it
        (8080, 29500, "8080"),
    ],
)
def test_ports_that_agree_or_are_not_both_given_are_fine(port, master_port, site_port):
    refuse_on_kubernetes(GANG, {"kubernetes": {"port": port}}, master_port, site_port)


def test_a_port_other_than_the_sites_is_compared():
    assert "port=8081" in refusal(refuse_on_kubernetes, GANG, {"kubernetes": {"port": 8081}}, 29500, "8080")


def test_local_metadata_on_batch_is_refused():
    told = refusal(refuse_on_batch, GANG, 4, BATCH, "local")
    for word in (
        "Step train",
        "gang of 4 nodes",
        "@batch(queue='q')",
        "--metadata=local",
        "600 s",
        "--metadata=service",
    ):
        assert word in told


@pytest.mark.parametrize("metadata_type", ["local", "service"])
def test_a_foreach_of_gangs_on_batch_is_refused_with_any_metadata(metadata_type):
    told = refusal(refuse_on_batch, IN_FOREACH, 2, BATCH, metadata_type)
    for word in ("Step train", "@batch(queue='q')", "foreach of step items", "exactly 2 finished tasks", "@kubernetes"):
        assert word in told


@pytest.mark.parametrize(
    ("gang", "num_nodes", "decorators", "metadata_type"),
    [
        (GANG, 2, BATCH, "service"),
        (GANG, 2, {"kubernetes": {}}, "local"),
        (IN_FOREACH, 2, {"kubernetes": {}}, "local"),
        (GANG, 2, {}, "local"),
        (GANG, 1, BATCH, "local"),  # it waits for nobody
        (IN_FOREACH, 1, BATCH, "local"),
        (GANG, None, BATCH, "local"),  # asked again when it is known
    ],
)
def test_gangs_that_see_their_end_are_fine(gang, num_nodes, decorators, metadata_type):
    refuse_on_batch(gang, num_nodes, decorators, metadata_type)


def test_what_is_for_fargate_only_is_refused():
    told = refusal(refuse_fargate_attributes, GANG, {"batch": {"ephemeral_storage": 30}})
    assert "@batch(ephemeral_storage=30)" in told
    assert "TorchrunSingleNodeMultiGPU" in told


@pytest.mark.parametrize("decorators", [{}, BATCH, {"batch": {"ephemeral_storage": None}}, {"kubernetes": {}}])
def test_without_it_nothing_is_refused(decorators):
    refuse_fargate_attributes(GANG, decorators)


@pytest.mark.parametrize("machines", ["FARGATE", "FARGATE_SPOT"])
def test_a_queue_on_fargate_is_refused(machines):
    asked = []
    told = refusal(refuse_fargate_queue, GANG, BATCH, lambda queue: asked.append(queue) or machines)
    assert asked == ["q"]
    for word in ("Step train", "@batch(queue='q')", machines, "queue on EC2"):
        assert word in told


@pytest.mark.parametrize("machines", ["EC2", "SPOT", None])
def test_any_other_queue_is_fine(machines):
    refuse_fargate_queue(GANG, BATCH, lambda _: machines)


@pytest.mark.parametrize("decorators", [{}, {"kubernetes": {}}, {"batch": {"queue": None}}])
def test_nobody_is_asked_where_no_queue_is_named(decorators):
    refuse_fargate_queue(GANG, decorators, lambda queue: pytest.fail(f"asked for {queue}"))


@pytest.mark.parametrize("answer", [{"jobQueues": []}, {}, RuntimeError("no network")])
def test_what_aws_does_not_tell_is_unknown(monkeypatch, answer):
    class Client:
        def describe_job_queues(self, jobQueues):  # noqa: N803 - as boto3 names it
            assert jobQueues == ["q"]
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(submit_checks, "get_aws_client", lambda *_, **__: Client())
    assert machines_of_queue("q") is None


def test_the_number_of_nodes_is_checked_when_the_run_tells_it():
    flow = Plain(use_cli=False)
    submission = Submission(flow, flow._graph, "train", None, "local")
    submission.check_nodes(1)
    assert "gang of 3 nodes" in refusal(submission.check_nodes, 3)
    assert "gang of 2 nodes" in refusal(submission.check_batch)


def test_the_run_tells_it_before_the_gang_is_started():
    flow = Plain(use_cli=False)
    decorator = TorchrunDecorator()
    decorator._submission = Submission(flow, flow._graph, "train", None, "local")

    def start(num_nodes):
        iterator = SimpleNamespace(num_parallel=num_nodes)
        cli_args = SimpleNamespace(task=SimpleNamespace(ubf_iter=iterator), command_options={}, env={})
        decorator.runtime_step_cli(cli_args, 0, 0, "ubf_control")

    start(1)
    assert "gang of 3 nodes" in refusal(start, 3)


@pytest.mark.parametrize(
    ("beside", "num_nodes", "told"),
    [("kubernetes", 1, None), ("kubernetes", 2, "2"), ("batch", 1, "1")],
)
def test_a_gang_of_one_is_an_ordinary_pod(beside, num_nodes, told):
    """Metaflow 2.19 refuses a job set of one."""
    decorator = TorchrunDecorator()
    decorator._siblings = [SimpleNamespace(name=beside), decorator]
    iterator = SimpleNamespace(num_parallel=num_nodes)
    cli_args = SimpleNamespace(task=SimpleNamespace(ubf_iter=iterator), command_options={}, env={})
    decorator.runtime_step_cli(cli_args, 0, 0, "ubf_control")
    assert cli_args.command_options.get("num-parallel") == told
    # What lets the task see SIGTERM; only a pod's shell knows it.
    assert ("METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT" in cli_args.env) is (beside == "kubernetes")


def test_a_step_that_is_no_gang_is_not_checked():
    flow = Plain(use_cli=False)
    submission = Submission(flow, flow._graph, "join", None, "local")
    submission.check_kubernetes()
    submission.check_batch()
    submission.check_nodes(3)
