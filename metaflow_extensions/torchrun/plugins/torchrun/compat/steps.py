"""Private names of Metaflow's steps and tasks: decorators, a flow object's facts of its gang, the start of a task.

Read in ``metaflow/decorators.py``, ``plugins/parallel_decorator.py``, ``runtime.py`` and ``plugins/kubernetes`` of 2.13
and 2.19.39. `import metaflow` loads this module, and must not fail: what is missing is said where somebody writes
``@torchrun``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any

from metaflow import current

from .renamed import convenience, known, need

_PARALLEL = ("metaflow.plugins.parallel_decorator", "ParallelDecorator")
ParallelDecorator: Any = known(*_PARALLEL, known("metaflow.decorators", "StepDecorator", object))
UBF_CONTROL = known("metaflow.unbounded_foreach", "UBF_CONTROL", "ubf_control")
UNPACK_KEY = known("metaflow.user_configs.config_parameters", "UNPACK_KEY", "_unpacked_delayed_")
# What @timeout raises; ours stands in its place from when a node joins.
KUBERNETES_PORT = known("metaflow.metaflow_config", "KUBERNETES_PORT", None)
# What a pod's shell runs first.
_OWN_SCRIPT = known("metaflow.metaflow_config", "KUBERNETES_SANDBOX_INIT_SCRIPT", None) or ""
_POD_SCRIPT = "METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT"


def check_parallel() -> None:
    """Raise `TorchrunError` unless Metaflow's ``@parallel`` calls `setup_distributed_env` before the step's code."""
    need(known(*_PARALLEL), "setup_distributed_env")


def is_local() -> bool:
    """Return whether all tasks run on this machine, as ``metaflow.plugins.parallel_decorator`` does."""
    return os.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local") == "local"


# --- decorators beside ours, on the submitting machine ------------------------------------------------


def leave_nodes_to_us(decos: Sequence[Any]) -> None:
    """Keep a plain ``@parallel`` beside ``@torchrun`` from starting the nodes a second time."""
    for deco in decos:
        if type(deco) is ParallelDecorator:
            deco.task_decorate = lambda step_func, *_: step_func


def timeout_of(decos: Sequence[Any]) -> float | None:
    """Return the seconds of a step's ``@timeout``; None without one."""
    with convenience("the order in which the step's @timeout ends its workers"):
        return next((float(deco.secs) for deco in decos if deco.name == "timeout"), None)
    return None


def seconds_of_alarm(handler: Any) -> Any:
    """Return the seconds of the ``@timeout`` whose handler of the alarm this is; None if it is another's."""
    owner = getattr(handler, "__self__", None)
    return getattr(owner, "secs", 0) if getattr(owner, "name", None) == "timeout" else None


class SameInterpreter:
    """A Metaflow environment that starts local tasks with the interpreter of this one."""

    def __init__(self, environment: Any) -> None:
        # Metaflow asks the base environment here, as the runtime does for every task.
        self._environment = getattr(environment, "base_env", environment)

    def executable(self, *args: Any, **options: Any) -> Any:
        """Return the interpreter for a step; Metaflow's own method says what it takes."""
        # The real environment is asked first, since @conda and @pypi name interpreters of their own.
        asked = self._environment.executable(*args, **options)
        return sys.executable if asked in ("python", "python3") else asked

    def __getattr__(self, name: str) -> Any:
        # What else a later Metaflow asks for; the base environment is this one.
        if name in ("_environment", "base_env"):
            raise AttributeError(name)
        return getattr(self._environment, name)


# --- the command that starts a task (`CLIArgs`) -------------------------------------------------------


def num_nodes_told(cli_args: Any) -> int | None:
    """Return how many nodes the run has told for the control task that `cli_args` starts."""
    with convenience("the check of the number of nodes"):
        return int(cli_args.task.ubf_iter.num_parallel)
    return None


def start_one_node_as_pod(cli_args: Any) -> None:
    """Start a gang of one node on Kubernetes as an ordinary pod: Metaflow refuses to make a job set of one."""
    with convenience("a gang of one node as an ordinary pod"):
        if cli_args.command_options.get("num-parallel") == "1":
            del cli_args.command_options["num-parallel"]


def run_first_in_pod(cli_args: Any, script: str) -> None:
    """Make the pod's shell run `script` first, and then the user's own script."""
    with convenience("the signal to the workers when their pod is deleted"):
        cli_args.env[_POD_SCRIPT] = script + (_OWN_SCRIPT or "true")


def environment_of(cli_args: Any) -> MutableMapping[str, str]:
    """Return the variables with which the task starts, to be changed; where there are none, changes have no effect."""
    with convenience("the end of the tasks when the process of a local run is gone"):
        env: MutableMapping[str, str] = cli_args.env
        return env
    return {}


# --- in a task ----------------------------------------------------------------------------------------


def num_parallel(flow: Any) -> int:
    """Return how many nodes the gang of this task has."""
    count: int = need(need(flow, "_parallel_ubf_iter"), "num_parallel")
    return count


def make_gang_of_one(flow: Any) -> None:
    """Make the task that `spin` starts the whole gang; it starts one task, with the number of nodes of the run."""
    flow._parallel_ubf_iter = known("metaflow.flowspec", "ParallelUBF")(1)


def set_tasks_of_one(flow: Any, task: str) -> None:
    """Set what Metaflow's join reads of a control task, for an ordinary pod that is the whole gang."""
    flow._control_mapper_tasks = [task]
    flow._control_task_is_mapper_zero = True


def tasks_of(flow: Any) -> Sequence[str]:
    """Return the tasks of all nodes in order, each as run, step and task; on another node than the control node none."""
    tasks: Sequence[str] = getattr(flow, "_control_mapper_tasks", ())
    return tasks


def control_task_of(parallel: Any) -> str | None:
    """Return the control task, as `current.parallel` has it; None on the control node itself."""
    task: str | None = need(parallel, "control_task_id")
    return task


def offer(name: str, thing: Any) -> None:
    """Add `thing` to ``current`` for the step's code."""
    need(current, "_update_env")({name: thing})
