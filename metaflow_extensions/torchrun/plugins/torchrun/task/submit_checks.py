"""What can't work where the step is to run, said before anything is scheduled.

What goes wrong is that of Metaflow 2.19. What Metaflow refuses itself is not checked here, for example Fargate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..compat.renamed import convenience, known
from ..errors import TorchrunConfigError
from .run_calls import register

KUBERNETES_PORT = known("metaflow.metaflow_config", "KUBERNETES_PORT", None)
LintWarn: Any = known("metaflow.lint", "LintWarn", known("metaflow.exception", "MetaflowException", Exception))
# What is left out where Metaflow is otherwise than these checks know it.
SUBMISSION = "the checks of what can't work on Kubernetes and AWS Batch"
_LINT = "the check that a step with @torchrun is entered with num_parallel"


class Submission:
    """The checks of one step, each for the moment when Metaflow has said enough; a step that is no gang has none."""

    def __init__(self, flow: Any, graph: Any, step: str, master_port: int | None, metadata_type: str | None) -> None:
        self._flow = flow
        self._step = step
        self._master_port = master_port
        self._metadata_type = metadata_type  # Metaflow's metadata provider, for example "local"
        callers = [node for node in graph if step in (node.out_funcs or ()) and node.parallel_foreach]
        # `spin` heeds no @kubernetes, @batch or @catch, and its gang has one node (2.19).
        self._is_gang = bool(callers) and metadata_type != "spin"
        # Only the run will tell of what is no literal: Metaflow's parser leaves it as None.
        self._num_nodes = next((node.num_parallel for node in callers if isinstance(node.num_parallel, int)), None)
        around = [graph[parent] for parent in graph[step].split_parents]
        self._foreach = [node.name for node in around if node.type == "foreach" and not node.parallel_foreach]

    def _decorators(self) -> dict[str, Any]:
        """Return attributes by the decorator's name; read anew for each check, as some decorators come late."""
        return {deco.name: deco.attributes for deco in getattr(self._flow, self._step).decorators}

    def check_kubernetes(self) -> None:
        """Raise `TorchrunConfigError` for ``@catch`` on Kubernetes, and for a ``port`` there that is not `master_port`.

        Called for runs and deployments.
        """
        decorators, master_port = self._decorators(), self._master_port
        if not self._is_gang or "kubernetes" not in decorators:
            return
        if "catch" in decorators:
            # Metaflow's KubernetesDecorator.step_init refuses it for a decorator named "parallel", and ours is not.
            raise TorchrunConfigError(
                f"Step {self._step} has {_shown('catch', decorators, 'var')}, @torchrun and @kubernetes, but @catch does not "
                "work with a gang on Kubernetes; Metaflow refuses it beside @parallel, too. When a pod dies, the whole gang "
                "ends with it, and on a run @catch's fallback starts on the submitting machine, which lacks the gang's "
                "MF_MASTER_ADDR: the run ends with an internal error, or that is what gets caught instead of the cause. "
                "Remove @catch. To go on after a failed launch, write in the step: try: current.torch.run(...) except "
                "TorchrunError as error: self.failure = str(error). All nodes raise the same error. Against pods that die, "
                "use @retry."
            )
        port = decorators["kubernetes"].get("port")
        # @kubernetes takes METAFLOW_KUBERNETES_PORT where no port is written.
        if None not in (port, master_port) and str(port) not in (str(KUBERNETES_PORT), str(master_port)):
            raise TorchrunConfigError(
                f"Step {self._step}: @kubernetes(port={port}) and @torchrun(master_port={master_port}) disagree. Metaflow "
                "opens port on the pods (containerPort) and names it in MF_MASTER_PORT, but the gang would meet on "
                "master_port. Write the same number in both, or leave one of them out; master_port alone decides where the "
                "gang meets."
            )

    def check_batch(self, num_nodes: int | None = None) -> None:
        """Raise `TorchrunConfigError` if the control node would never see its nodes' ends on AWS Batch.

        Before it ends, Metaflow asks its metadata provider for the tasks of the step until there are as many
        as nodes, all finished; after 600 s it fails the task (`BatchDecorator._wait_for_mapper_tasks`). A gang
        of one does not wait. Only ``run`` and ``resume`` send gangs there. `num_nodes` is what the run has told.
        """
        decorators, count = self._decorators(), num_nodes or self._num_nodes
        if not self._is_gang or "batch" not in decorators or count is None or count < 2:
            return
        where = f"Step {self._step}, a gang of {count} nodes with {_shown('batch', decorators, 'queue')},"
        if self._foreach:
            raise TorchrunConfigError(
                f"{where} stands in the foreach of step {self._foreach[-1]} and can't finish there. On AWS Batch the control "
                f"node waits until the step has exactly {count} finished tasks, but the foreach's other gangs have theirs in "
                "it: the step would fail 600 s after its work is done. Train the items one after another in one gang (call "
                f"current.torch.run for each of them in step {self._step}), or start a run for each, or use @kubernetes "
                "instead of @batch."
            )
        if self._metadata_type == "local":
            raise TorchrunConfigError(
                f"{where} can't finish with --metadata=local. On AWS Batch the control node waits until the metadata shows "
                "the other nodes' tasks as finished, but local metadata is a folder in each node's own container: the step "
                "would fail 600 s after its work is done. Use a metadata service (--metadata=service with "
                "METAFLOW_SERVICE_URL), or num_parallel=1, or @kubernetes instead of @batch."
            )


def _shown(name: str, decorators: Mapping[str, Any], attribute: str) -> str:
    value = decorators[name].get(attribute)
    return f"@{name}" if value is None else f"@{name}({attribute}={value!r})"


def ignored_by_with(name: str) -> list[str]:
    """Return what ``--with`` says of the decorator `name`, which Metaflow drops where a step has it in its source (2.19)."""
    specs: list[str] = []
    with convenience("the word that --with is ignored where a step has its decorator in the source"):
        from metaflow._vendor import click

        context = click.get_current_context(silent=True)
        while context is not None:  # an option of the command, and of the program before it
            specs += context.params.get("decospecs") or ()
            context = context.parent
    return [f"--with {spec}" for spec in specs if spec.startswith(f"{name}:")]


def check_entered_with_num_parallel(graph: Any) -> None:
    """Say how to enter a ``@torchrun`` step; take it off steps that only ``--with torchrun`` gave it.

    ``--with`` decorates every step of a flow, also those that are not parallel (`_attach_decorators`, Metaflow 2.19).
    """
    plain = None
    with convenience(_LINT):
        plain = _first_plain_step(graph)
    if plain is not None:
        name, entered, *where = plain
        raise LintWarn(
            f"Step *{name}* has @torchrun but is not entered with num_parallel. In step *{entered}*, write "
            f"self.next(self.{name}, num_parallel=2) to run it on 2 nodes. For one node without "
            "num_parallel, remove @torchrun and use TorchrunSingleNodeMultiGPU.",
            *where,
        )


def _first_plain_step(graph: Any) -> tuple[Any, ...] | None:
    """Return a step's name, the step before it, and line and file, where ``@torchrun`` stands at a step that is no gang."""
    for node in graph:
        for deco in [d for d in node.decorators if d.name == "torchrun"]:
            callers = [caller for caller in graph if node.name in (caller.out_funcs or ())]
            if callers and all(caller.parallel_foreach for caller in callers):
                continue
            if deco.statically_defined:
                entered = callers[0].name if callers else "the step before it"
                return node.name, entered, node.func_lineno, node.source_file
            node.decorators.remove(deco)
            node.parallel_step = any(getattr(d, "IS_PARALLEL", False) for d in node.decorators)
    return None


def _check_first(check: Callable[[Any], None]) -> None:
    """Have `check` go before Metaflow's own checks (metaflow.lint, 2.19), which would speak of @parallel and not say how."""
    from metaflow.lint import linter

    linter.ensure_static_graph(linter.check(check))
    linter._checks.insert(0, linter._checks.pop())


with convenience(_LINT):
    _check_first(check_entered_with_num_parallel)
register()
