"""What can't work where the step is to run, said before anything is scheduled.

What goes wrong is that of Metaflow 2.19. What Metaflow refuses itself is not checked here, for example Fargate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metaflow._vendor import click
from metaflow.lint import LintWarn, linter
from metaflow.metaflow_config import KUBERNETES_PORT

from ..errors import TorchrunConfigError

Decorators = Mapping[str, Mapping[str, Any]]  # attributes by the decorator's name


@dataclass(frozen=True)
class GangStep:
    """A step that is entered with ``num_parallel``, as far as the source tells it."""

    name: str
    num_nodes: int | None  # None if only the run will tell
    foreach: str | None  # the step whose foreach it stands in


class Submission:
    """The checks of one step, each for the moment when Metaflow has said enough."""

    def __init__(self, flow: Any, graph: Any, step: str, master_port: int | None, metadata_type: str | None) -> None:
        self._flow = flow  # its decorators are read anew for each check, as some come late
        self._step = gang_step(graph, step)
        self._master_port = master_port
        self._metadata_type = metadata_type  # Metaflow's metadata provider, for example "local"

    def check_kubernetes(self) -> None:
        """Check what is meant for Kubernetes; runs and deployments go there."""
        if self._step is not None:
            refuse_on_kubernetes(self._step, self._decorators(self._step), self._master_port, KUBERNETES_PORT)

    def check_batch(self, num_nodes: int | None = None) -> None:
        """Check what is meant for AWS Batch, where only ``run`` and ``resume`` send gangs."""
        if self._step is not None:
            count = num_nodes or self._step.num_nodes  # what the run has told, or else the source
            refuse_on_batch(self._step, count, self._decorators(self._step), self._metadata_type)

    def _decorators(self, step: GangStep) -> Decorators:
        return {deco.name: deco.attributes for deco in getattr(self._flow, step.name).decorators}


def gang_step(graph: Any, name: str) -> GangStep | None:
    """Return the step `name`; None if it is not entered with ``num_parallel``."""
    caller = next((node for node in graph if name in (node.out_funcs or ()) and node.parallel_foreach), None)
    if caller is None:
        return None
    # Metaflow's parser leaves what is no literal as None.
    num_nodes = caller.num_parallel if isinstance(caller.num_parallel, int) else None
    around = [graph[parent] for parent in graph[name].split_parents]
    foreach = [node.name for node in around if node.type == "foreach" and not node.parallel_foreach]
    return GangStep(name, num_nodes, foreach[-1] if foreach else None)


def refuse_on_kubernetes(
    step: GangStep, decorators: Decorators, master_port: int | None, site_port: str | int | None
) -> None:
    """Raise `TorchrunConfigError` for ``@catch`` on Kubernetes, and for a ``port`` there that is not `master_port`.
    `site_port` is ``METAFLOW_KUBERNETES_PORT``, which ``@kubernetes`` takes where no port is written.
    """
    kubernetes = decorators.get("kubernetes")
    if kubernetes is None:
        return
    if "catch" in decorators:
        # Metaflow's KubernetesDecorator.step_init refuses it for a decorator named "parallel", and ours is not.
        raise TorchrunConfigError(
            f"Step {step.name} has {_shown('catch', decorators, 'var')}, @torchrun and @kubernetes, but @catch does not "
            "work with a gang on Kubernetes; Metaflow refuses it beside @parallel, too. When a pod dies, the whole gang "
            "ends with it, and on a run @catch's fallback starts on the submitting machine, which lacks the gang's "
            "MF_MASTER_ADDR: the run ends with an internal error, or that is what gets caught instead of the cause. Remove "
            "@catch. To go on after a failed launch, write in the step: try: current.torch.run(...) except TorchrunError as "
            "error: self.failure = str(error). All nodes raise the same error. Against pods that die, use @retry."
        )
    port = kubernetes.get("port")
    if None not in (port, master_port) and str(port) not in (str(site_port), str(master_port)):
        raise TorchrunConfigError(
            f"Step {step.name}: @kubernetes(port={port}) and @torchrun(master_port={master_port}) disagree. Metaflow opens "
            "port on the pods (containerPort) and names it in MF_MASTER_PORT, but the gang would meet on master_port. "
            "Write the same number in both, or leave one of them out; master_port alone decides where the gang meets."
        )


def refuse_on_batch(step: GangStep, num_nodes: int | None, decorators: Decorators, metadata_type: str | None) -> None:
    """Raise `TorchrunConfigError` if the control node would never see its nodes' ends on AWS Batch.

    Before it ends, Metaflow asks its metadata provider for the tasks of the step until there are as many
    as nodes, all finished; after 600 s it fails the task (`BatchDecorator._wait_for_mapper_tasks`). A gang
    of one does not wait.
    """
    if "batch" not in decorators or num_nodes is None or num_nodes < 2:
        return
    where = f"Step {step.name}, a gang of {num_nodes} nodes with {_shown('batch', decorators, 'queue')},"
    if step.foreach is not None:
        raise TorchrunConfigError(
            f"{where} stands in the foreach of step {step.foreach} and can't finish there. On AWS Batch the control node "
            f"waits until the step has exactly {num_nodes} finished tasks, but the foreach's other gangs have theirs in it: "
            "the step would fail 600 s after its work is done. Train the items one after another in one gang (call "
            f"current.torch.run for each of them in step {step.name}), or start a run for each, or use @kubernetes "
            "instead of @batch."
        )
    if metadata_type == "local":
        raise TorchrunConfigError(
            f"{where} can't finish with --metadata=local. On AWS Batch the control node waits until the metadata shows the "
            "other nodes' tasks as finished, but local metadata is a folder in each node's own container: the step would "
            "fail 600 s after its work is done. Use a metadata service (--metadata=service with METAFLOW_SERVICE_URL), or "
            "num_parallel=1, or @kubernetes instead of @batch."
        )


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

    ``--with`` decorates every step of a flow, also those that are not parallel (`_attach_decorators`, Metaflow 2.19).
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
                    f"self.next(self.{node.name}, num_parallel=2) to run it on 2 nodes. For one node without "
                    "num_parallel, remove @torchrun and use TorchrunSingleNodeMultiGPU.",
                    node.func_lineno,
                    node.source_file,
                )
            node.decorators.remove(deco)
            node.parallel_step = any(getattr(d, "IS_PARALLEL", False) for d in node.decorators)


# Before Metaflow's own checks (metaflow.lint, 2.19), which would speak of @parallel and not say how.
linter.ensure_static_graph(linter.check(check_entered_with_num_parallel))
linter._checks.insert(0, linter._checks.pop())
