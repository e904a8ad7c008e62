"""What can't work where the step is to run, said before anything is scheduled.

What goes wrong, and where Metaflow itself would notice, is that of Metaflow 2.19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metaflow._vendor import click
from metaflow.lint import LintWarn, linter
from metaflow.metaflow_config import AWS_SANDBOX_ENABLED, KUBERNETES_PORT
from metaflow.plugins.aws.aws_client import get_aws_client

from .errors import TorchrunConfigError

Decorators = Mapping[str, Mapping[str, Any]]  # attributes by the decorator's name

# To ask AWS which machines a queue has; Metaflow asks the same when it submits the job.
_AWS_TIMEOUT_S = 5
_ONE_NODE = "For one node without num_parallel, remove @torchrun and use TorchrunSingleNodeMultiGPU."
_NO_FARGATE = f"Use a queue on EC2, or @kubernetes. {_ONE_NODE}"


@dataclass(frozen=True)
class Gang:
    """A step that is entered with ``num_parallel``, as far as the source tells it.

    Attributes
    ----------
    step : str
        Its name.
    num_nodes : int or None
        How many nodes; None if only the run will tell.
    foreach : str or None
        The step whose foreach it stands in.
    """

    step: str
    num_nodes: int | None
    foreach: str | None


class Submission:
    """The checks of one step, each for the moment when Metaflow has said enough.

    Parameters
    ----------
    flow, graph : Any
        Metaflow's; the step's decorators are read anew for each check, as some come late.
    step : str
        The step's name.
    master_port : int or None
        The attribute of ``@torchrun``.
    metadata_type : str or None
        Metaflow's metadata provider, for example ``"local"``.
    """

    def __init__(self, flow: Any, graph: Any, step: str, master_port: int | None, metadata_type: str | None) -> None:
        self._flow = flow
        self._gang = gang_at(graph, step)
        self._master_port = master_port
        self._metadata_type = metadata_type

    def check_kubernetes(self) -> None:
        """Check what is meant for Kubernetes; runs and deployments go there."""
        if self._gang is not None:
            refuse_on_kubernetes(self._gang, self._decorators(self._gang), self._master_port, KUBERNETES_PORT)

    def check_batch(self) -> None:
        """Check what is meant for AWS Batch; only ``run`` and ``resume`` send gangs there."""
        if self._gang is not None:
            decorators = self._decorators(self._gang)
            refuse_fargate_attributes(self._gang, decorators)
            refuse_on_batch(self._gang, self._gang.num_nodes, decorators, self._metadata_type)
            refuse_fargate_queue(self._gang, decorators, machines_of_queue)  # last: it asks AWS

    def check_nodes(self, num_nodes: int) -> None:
        """Check what depends on the number of nodes, when the run has told it."""
        if self._gang is not None:
            refuse_on_batch(self._gang, num_nodes, self._decorators(self._gang), self._metadata_type)

    def _decorators(self, gang: Gang) -> Decorators:
        return {deco.name: deco.attributes for deco in getattr(self._flow, gang.step).decorators}


def gang_at(graph: Any, step: str) -> Gang | None:
    """Return the gang that `step` is; None if it is not entered with ``num_parallel``."""
    caller = next((node for node in graph if step in (node.out_funcs or ()) and node.parallel_foreach), None)
    if caller is None:
        return None
    # Metaflow's parser leaves what is no literal as None.
    num_nodes = caller.num_parallel if isinstance(caller.num_parallel, int) else None
    around = [graph[name] for name in graph[step].split_parents]
    foreach = [node.name for node in around if node.type == "foreach" and not node.parallel_foreach]
    return Gang(step, num_nodes, foreach[-1] if foreach else None)


def refuse_on_kubernetes(
    gang: Gang, decorators: Decorators, master_port: int | None, site_port: str | int | None
) -> None:
    """Raise if the step would go to Kubernetes with settings that can't work there.

    Parameters
    ----------
    gang : Gang
        The step.
    decorators : mapping
        The step's decorators.
    master_port : int or None
        The attribute of ``@torchrun``.
    site_port : str, int or None
        ``METAFLOW_KUBERNETES_PORT``, which ``@kubernetes`` takes where no port is written.

    Raises
    ------
    TorchrunConfigError
        If ``@catch`` is there, or if ``port`` is not `master_port`.
    """
    kubernetes = decorators.get("kubernetes")
    if kubernetes is None:
        return
    if "catch" in decorators:
        # Metaflow's KubernetesDecorator.step_init refuses it for a decorator named "parallel", and ours is not.
        raise TorchrunConfigError(
            f"Step {gang.step} has {_shown('catch', decorators, 'var')}, @torchrun and @kubernetes, but @catch does not "
            "work with a gang on Kubernetes; Metaflow refuses it beside @parallel, too. When a pod dies, the whole gang "
            "ends with it, and on a run @catch's fallback starts on the submitting machine, which lacks the gang's "
            "MF_MASTER_ADDR: the run ends with an internal error, or that is what gets caught instead of the cause. Remove "
            "@catch. To go on after a failed launch, write in the step: try: current.torch.run(...) except TorchrunError as "
            "error: self.failure = str(error). All nodes raise the same error. Against pods that die, use @retry."
        )
    port = kubernetes.get("port")
    if port is None or master_port is None or str(port) == str(site_port):
        return
    if str(port) != str(master_port):
        raise TorchrunConfigError(
            f"Step {gang.step}: @kubernetes(port={port}) and @torchrun(master_port={master_port}) disagree. Metaflow opens "
            "port on the pods (containerPort) and names it in MF_MASTER_PORT, but the gang would meet on master_port. "
            "Write the same number in both, or leave one of them out; master_port alone decides where the gang meets."
        )


def refuse_on_batch(gang: Gang, num_nodes: int | None, decorators: Decorators, metadata_type: str | None) -> None:
    """Raise if the step would go to AWS Batch and never see the ends of its nodes there.

    Before the control node ends, Metaflow asks its metadata provider for the tasks of the step until
    there are as many as nodes, all finished; after 600 s it fails the task
    (`BatchDecorator._wait_for_mapper_tasks`). A gang of one does not wait.

    Parameters
    ----------
    gang : Gang
        The step.
    num_nodes : int or None
        How many nodes; None if that is not known yet.
    decorators : mapping
        The step's decorators.
    metadata_type : str or None
        Metaflow's metadata provider.

    Raises
    ------
    TorchrunConfigError
        If the step stands in a foreach, or if the provider is in each node's own folder.
    """
    if "batch" not in decorators or num_nodes is None or num_nodes < 2:
        return
    where = f"Step {gang.step}, a gang of {num_nodes} nodes with {_shown('batch', decorators, 'queue')},"
    if gang.foreach is not None:
        raise TorchrunConfigError(
            f"{where} stands in the foreach of step {gang.foreach} and can't finish there. On AWS Batch the control node "
            f"waits until the step has exactly {num_nodes} finished tasks, but the foreach's other gangs have theirs in it: "
            "the step would fail 600 s after its work is done. Train the items one after another in one gang (call "
            f"current.torch.run for each of them in step {gang.step}), or start a run for each, or use @kubernetes "
            "instead of @batch."
        )
    if metadata_type == "local":
        raise TorchrunConfigError(
            f"{where} can't finish with --metadata=local. On AWS Batch the control node waits until the metadata shows the "
            "other nodes' tasks as finished, but local metadata is a folder in each node's own container: the step would "
            "fail 600 s after its work is done. Use a metadata service (--metadata=service with METAFLOW_SERVICE_URL), or "
            "num_parallel=1, or @kubernetes instead of @batch."
        )


def refuse_fargate_attributes(gang: Gang, decorators: Decorators) -> None:
    """Raise if ``@batch`` has what is for Fargate only, which has no multi-node jobs.

    Raises
    ------
    TorchrunConfigError
        If it has ``ephemeral_storage``.
    """
    if decorators.get("batch", {}).get("ephemeral_storage"):
        raise TorchrunConfigError(
            f"Step {gang.step} is entered with num_parallel and has {_shown('batch', decorators, 'ephemeral_storage')}. That "
            "is for Fargate only (Metaflow refuses it on EC2), but Fargate has no multi-node jobs. Remove "
            f"ephemeral_storage. {_NO_FARGATE}"
        )


def refuse_fargate_queue(gang: Gang, decorators: Decorators, machines_of: Callable[[str], str | None]) -> None:
    """Raise if the queue of ``@batch`` is on Fargate, which has no multi-node jobs.

    Metaflow says so when it submits the gang's job, after all steps before it have run.

    Parameters
    ----------
    gang : Gang
        The step.
    decorators : mapping
        The step's decorators.
    machines_of : callable
        Tells what kind of machines a queue has; see `machines_of_queue`.

    Raises
    ------
    TorchrunConfigError
        If it is.
    """
    queue = decorators.get("batch", {}).get("queue")
    machines = machines_of(queue) if queue else None
    if machines is not None and machines.startswith("FARGATE"):
        raise TorchrunConfigError(
            f"Step {gang.step} is entered with num_parallel, but the queue of {_shown('batch', decorators, 'queue')} has "
            f"{machines} machines, and AWS Batch has no multi-node jobs there. {_NO_FARGATE}"
        )


def machines_of_queue(queue: str) -> str | None:
    """Return the type of the AWS Batch queue's machines, such as ``"EC2"``; None if AWS does not tell.

    Metaflow decides by the same answers, and asks for them when it submits a job.
    """
    if AWS_SANDBOX_ENABLED:
        return None  # it may not ask there
    config = {"connect_timeout": _AWS_TIMEOUT_S, "read_timeout": _AWS_TIMEOUT_S, "retries": {"max_attempts": 1}}
    try:
        client = get_aws_client("batch", client_params={"config": config})
        (found,) = client.describe_job_queues(jobQueues=[queue])["jobQueues"]
        first = found["computeEnvironmentOrder"][0]["computeEnvironment"]
        (environment,) = client.describe_compute_environments(computeEnvironments=[first])["computeEnvironments"]
        return str(environment["computeResources"]["type"])
    except Exception:  # no rights, no such queue, no network: Metaflow will tell, this is only a courtesy
        return None


def _shown(name: str, decorators: Decorators, attribute: str) -> str:
    value = decorators[name].get(attribute)
    return f"@{name}" if value is None else f"@{name}({attribute}={value!r})"


def ignored_by_with(name: str) -> list[str]:
    """Return what ``--with`` says of the decorator `name`, which Metaflow drops where a step has it in its source (2.19)."""
    specs: list[str] = []
    context = click.get_current_context(silent=True)
    while context is not None:  # an option of the command, and of the program before it
        specs += context.params.get("decospecs") or ()
        context = context.parent
    return [f"--with {spec}" for spec in specs if spec.startswith(f"{name}:")]


def check_entered_with_num_parallel(graph: Any) -> None:
    """Say how to enter a ``@torchrun`` step; take it off steps that only ``--with torchrun`` gave it.

    ``--with`` decorates every step of a flow (`_attach_decorators`, Metaflow 2.19), also those that
    are not parallel.

    Raises
    ------
    LintWarn
        If a step decorated in the source is not entered with ``num_parallel``.
    """
    for node in graph:
        for deco in [d for d in node.decorators if d.name == "torchrun"]:
            callers = [caller for caller in graph if node.name in (caller.out_funcs or ())]
            if callers and all(caller.parallel_foreach for caller in callers):
                continue
            if deco.statically_defined:
                entered = callers[0].name if callers else "the step before it"
                raise LintWarn(
                    f"Step *{node.name}* has @torchrun but is not entered with num_parallel. In step *{entered}*, write "
                    f"self.next(self.{node.name}, num_parallel=2) to run it on 2 nodes. {_ONE_NODE}",
                    node.func_lineno,
                    node.source_file,
                )
            node.decorators.remove(deco)
            node.parallel_step = any(getattr(d, "IS_PARALLEL", False) for d in node.decorators)


# Before Metaflow's own checks (metaflow.lint, 2.19), which would speak of @parallel and not say how.
linter.ensure_static_graph(linter.check(check_entered_with_num_parallel))
linter._checks.insert(0, linter._checks.pop())
