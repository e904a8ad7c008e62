"""Refuses what can't work on a step's backend, before anything is scheduled.

The limits are those of Metaflow 2.19. What Metaflow refuses itself (Fargate, for example) is not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat.graph import LintWarn, decorators_of, entry_of, first_plain_step, is_on_argo
from ..compat.steps import KUBERNETES_PORT
from ..errors import TorchrunConfigError
from ..gang.launch import GONE
from ..parsing import DEFAULT_RESTART_ON
from ..settings import StepSettings, check_spares
from .run_calls import check_arguments_of_run, check_steps_without_torchrun, tell_missing_scripts


class Submission:
    """The checks of one step, each made as soon as Metaflow has the facts for it; a step that is no gang has none."""

    def __init__(self, flow: Any, graph: Any, step: str, settings: StepSettings, metadata_type: str | None) -> None:
        self._flow, self._step, self._settings = flow, step, settings
        self._metadata_type = metadata_type  # Metaflow's metadata provider, for example "local"
        is_parallel, self._num_nodes, self._foreach = entry_of(graph, step)
        # `spin` heeds no @kubernetes, @batch or @catch, and its gang has one node (2.19).
        self._is_gang = is_parallel and metadata_type != "spin"

    def check_loss(self, num_nodes: int | None = None) -> None:
        """Raise `TorchrunConfigError` for spare nodes or fewer nodes where that can't work.

        `num_nodes` is what the run has told.
        """
        if not self._is_gang:
            return
        decorators, settings = decorators_of(self._flow, self._step), self._settings
        lost = sorted(settings.restart_on & GONE) if settings.restart_on != DEFAULT_RESTART_ON else []
        if "batch" in decorators and lost and not settings.spare_nodes and settings.min_nodes is None:
            raise TorchrunConfigError(
                f"Step {self._step}: @torchrun(restart_on={lost}) needs spare_nodes or min_nodes on @batch: AWS Batch starts "
                "no other node in the place of one that is lost. Add one of them, or remove "
                f"{', '.join(lost)} from restart_on."
            )
        count = num_nodes or self._num_nodes
        if count is not None:
            check_spares(settings, count, self._step)
        # On a run the join takes the tasks that the control node names; Argo's takes all, by their numbers
        # (jobset_input_paths.py, 2.19).
        all_nodes = None if count is None else count - settings.spare_nodes
        if is_on_argo(decorators) and settings.min_nodes not in (None, all_nodes):
            raise TorchrunConfigError(
                f"Step {self._step}: @torchrun(min_nodes={settings.min_nodes}) does not work on Argo Workflows: its join "
                "needs the results of all nodes. Remove min_nodes; spare_nodes and max_restarts work there, too."
            )

    def check_kubernetes(self) -> None:
        """Raise `TorchrunConfigError` for ``@catch`` on Kubernetes, and for a ``port`` there that is not `master_port`.

        Called for runs and deployments.
        """
        decorators, master_port = decorators_of(self._flow, self._step), self._settings.master_port
        if not self._is_gang or "kubernetes" not in decorators:
            return
        if "catch" in decorators:
            # Metaflow's KubernetesDecorator.step_init refuses it for a decorator named "parallel", and ours is not.
            raise TorchrunConfigError(
                f"Step {self._step} has {_shown('catch', decorators, 'var')}, @torchrun and @kubernetes, but @catch does not "
                "work with a gang on Kubernetes: when a pod dies, the whole gang ends with it, and @catch's fallback fails "
                "on the submitting machine. Remove @catch. To go on after a failed launch, write in the step: try: "
                "current.torch.run(...) except TorchrunError as error: self.failure = str(error). All nodes raise the same "
                "error. Against pods that die, use @retry."
            )
        port = decorators["kubernetes"].get("port")
        # @kubernetes takes METAFLOW_KUBERNETES_PORT where no port is written.
        if None not in (port, master_port) and str(port) not in (str(KUBERNETES_PORT), str(master_port)):
            raise TorchrunConfigError(
                f"Step {self._step}: @kubernetes(port={port}) and @torchrun(master_port={master_port}) disagree. Write the "
                "same number in both, or leave one of them out; master_port alone decides where the gang meets."
            )

    def check_batch(self, num_nodes: int | None = None) -> None:
        """Raise `TorchrunConfigError` if the control node would never see its nodes' ends on AWS Batch.

        Before it ends, Metaflow asks its metadata provider for the tasks of the step until there are as many
        as nodes, all finished; after 600 s it fails the task (`BatchDecorator._wait_for_mapper_tasks`). A gang
        of one does not wait. Only ``run`` and ``resume`` send gangs there. `num_nodes` is what the run has told.
        """
        decorators, count = decorators_of(self._flow, self._step), num_nodes or self._num_nodes
        if not self._is_gang or "batch" not in decorators or count is None or count < 2:
            return
        where = f"Step {self._step}, a gang of {count} nodes with {_shown('batch', decorators, 'queue')},"
        if self._foreach:
            raise TorchrunConfigError(
                f"{where} stands in the foreach of step {self._foreach[-1]} and can't finish there: the control node waits "
                f"until the step has exactly {count} finished tasks, but the foreach's other gangs have theirs in it. Train "
                f"the items one after another in one gang (call current.torch.run for each of them in step {self._step}), or "
                "start a run for each, or use @kubernetes instead of @batch."
            )
        if self._metadata_type == "local":
            raise TorchrunConfigError(
                f"{where} can't finish with --metadata=local: the control node waits until the metadata shows the other "
                "nodes' tasks as finished, but local metadata is a folder in each container. Use a metadata service "
                "(--metadata=service with METAFLOW_SERVICE_URL), or num_parallel=1, or @kubernetes instead of @batch."
            )


def _shown(name: str, decorators: Mapping[str, Any], attribute: str) -> str:
    value = decorators[name].get(attribute)
    return f"@{name}" if value is None else f"@{name}({attribute}={value!r})"


def check_source(graph: Any) -> None:
    """Check what the source of a flow tells, for a run or a deployment."""
    plain = first_plain_step(graph)
    if plain is not None:  # Metaflow's own checks would speak of @parallel, and not say how
        name, entered, *where = plain
        raise LintWarn(
            f"Step *{name}* has @torchrun but is not entered with num_parallel. In step *{entered}*, write "
            f"self.next(self.{name}, num_parallel=2) to run it on 2 nodes. For one node without "
            "num_parallel, remove @torchrun and use TorchrunSingleNodeMultiGPU.",
            *where,
        )
    check_steps_without_torchrun(graph)
    check_arguments_of_run(graph)
    tell_missing_scripts(graph)
