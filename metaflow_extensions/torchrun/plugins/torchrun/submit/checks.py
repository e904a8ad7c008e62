"""Refuses what can't work on a step's backend, before anything is scheduled.

The limits are those of Metaflow 2.19. What Metaflow refuses itself (Fargate, for example) is not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..compat.graph import entry_of, is_on_argo
from ..compat.jobs import bring_pods_again
from ..errors import TorchrunConfigError
from ..gang.launch import GONE
from ..parsing import DEFAULT_RESTART_ON
from ..settings import StepSettings, check_spares


class Submission:
    """The checks of one step, made whenever Metaflow has told more of it; a step that is no gang has none."""

    def __init__(self, flow: Any, graph: Any, step: str, settings: StepSettings, metadata_type: str | None) -> None:
        self._flow, self._step, self._settings = flow, step, settings
        self._metadata_type = metadata_type  # Metaflow's metadata provider, for example "local"
        is_parallel, self._num_nodes, self._foreach = entry_of(graph, step)
        # `spin` heeds no @kubernetes, @batch or @catch, and its gang has one node (2.19).
        self._is_gang = is_parallel and metadata_type != "spin"

    def check(self, num_nodes: int | None = None, is_run: bool = False) -> None:
        """Raise `TorchrunConfigError` for what can't work.

        `num_nodes` is what the run has told; `is_run` says that this is for ``run`` or ``resume``.
        """
        if not self._is_gang:
            return
        # The present ones: some are added late.
        decorators = {deco.name: deco.attributes for deco in getattr(self._flow, self._step).decorators}
        count = num_nodes or self._num_nodes
        if count is not None:
            check_spares(self._settings, count, self._step)
        for why in self._wrong(decorators, count, is_run):
            raise TorchrunConfigError(f"Step {self._step}{why}")

    def bring_pods_again(self) -> None:
        """Have the job sets that this process makes bring pods again that a launch can go on with."""
        if self._settings.replaces_nodes:
            bring_pods_again(self._step)

    def _wrong(self, decorators: Mapping[str, Any], count: int | None, is_run: bool) -> Iterator[str]:
        """Yield what does not go together on the step's backend."""
        settings = self._settings
        if "kubernetes" in decorators and "catch" in decorators:
            # Metaflow's KubernetesDecorator.step_init refuses it for a decorator named "parallel", and ours is not.
            yield (
                " has @catch, @torchrun and @kubernetes, but @catch does not work with a gang on Kubernetes: when a pod "
                "dies, the whole gang ends with it, and @catch's fallback fails on the submitting machine. Remove @catch. To "
                "go on after a failed launch, write in the step: try: current.torch.run(...) except TorchrunError as error: "
                "self.failure = str(error). All nodes raise the same error. Against pods that "
                "die, use @retry."
            )
        lost = sorted(settings.restart_on & GONE) if settings.restart_on != DEFAULT_RESTART_ON else []
        if "batch" in decorators and lost and not settings.spare_nodes and settings.min_nodes is None:
            yield (
                f": @torchrun(restart_on={lost}) needs spare_nodes or min_nodes on @batch: AWS Batch starts no other node in "
                f"the place of one that is lost. Add one of them, or remove {', '.join(lost)} from restart_on."
            )
        # On a run the join takes the tasks that the control node names; Argo's takes all, by their numbers
        # (jobset_input_paths.py, 2.19).
        all_nodes = None if count is None else count - settings.spare_nodes
        if is_on_argo(decorators) and settings.min_nodes not in (None, all_nodes):
            yield (
                f": @torchrun(min_nodes={settings.min_nodes}) does not work on Argo Workflows: its join needs the results of "
                "all nodes. Remove min_nodes; spare_nodes and max_restarts work there, too."
            )
        if is_run and "batch" in decorators and count is not None and count > 1:  # a gang of one waits for nobody
            yield from self._never_ending(count)

    def _never_ending(self, count: int) -> Iterator[str]:
        """Yield why the control node would never see its nodes' ends on AWS Batch.

        Before it ends, Metaflow asks its metadata provider for the tasks of the step until there are as many
        as nodes, all finished; after 600 s it fails the task (`BatchDecorator._wait_for_mapper_tasks`).
        """
        where = f", a gang of {count} nodes with @batch,"
        if self._foreach:
            yield (
                f"{where} stands in the foreach of step {self._foreach[-1]} and can't finish there: the control node waits "
                f"until the step has exactly {count} finished tasks, but the foreach's other gangs have theirs in it. Train "
                f"the items one after another in one gang (call current.torch.run for each of them in step {self._step}), or "
                "start a run for each, or use @kubernetes instead of @batch."
            )
        if self._metadata_type == "local":
            yield (
                f"{where} can't finish with --metadata=local: the control node waits until the metadata shows the other "
                "nodes' tasks as finished, but local metadata is a folder in each container. Use a metadata service "
                "(--metadata=service with METAFLOW_SERVICE_URL), or num_parallel=1, or @kubernetes instead of @batch."
            )
