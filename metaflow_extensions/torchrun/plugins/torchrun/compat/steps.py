"""Private names of Metaflow's steps and tasks: decorators, a flow object's facts of its gang, the start of a task.

Read in ``metaflow/decorators.py``, ``plugins/parallel_decorator.py``, ``runtime.py`` and ``plugins/kubernetes`` of 2.13
and 2.19.39. `import metaflow` loads this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from traceback import walk_stack, walk_tb
from typing import Any

from metaflow import current

from .renamed import known

# It calls `setup_distributed_env` before the step's code.
ParallelDecorator: Any = known("metaflow.plugins.parallel_decorator:ParallelDecorator", object)
UBF_CONTROL = known("metaflow.unbounded_foreach:UBF_CONTROL")
UNPACK_KEY = known("metaflow.user_configs.config_parameters:UNPACK_KEY")
# The user's script that a pod's shell runs first.
_OWN_SCRIPT = known("metaflow.metaflow_config:KUBERNETES_SANDBOX_INIT_SCRIPT") or ""
_POD_SCRIPT = "METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT"


def runs_on() -> str:
    """Return the backend of this task: "local", "kubernetes" (also under Argo) or "aws-batch"."""
    return os.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local")


def is_local() -> bool:
    """Return whether all tasks run on this machine, as ``metaflow.plugins.parallel_decorator`` does."""
    return runs_on() == "local"


def flow_folder() -> str | None:
    """Return the folder of the flow file, which is the program that Metaflow runs."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else None


# --- decorators beside ours, on the submitting machine ------------------------------------------------


def leave_nodes_to_us(decos: Sequence[Any]) -> None:
    """Keep a plain ``@parallel`` beside ``@torchrun`` from starting the nodes a second time."""
    for deco in decos:
        if type(deco) is ParallelDecorator:
            deco.task_decorate = lambda step_func, *_: step_func


def timeout_of(decos: Sequence[Any]) -> float | None:
    """Return the seconds of a step's ``@timeout``; None without one."""
    return next((float(deco.secs) for deco in decos if deco.name == "timeout"), None)


def with_this_interpreter(environment: Any) -> Any:
    """Return a Metaflow environment that starts local tasks with this process's interpreter."""
    same = copy(getattr(environment, "base_env", environment))  # the base is what Metaflow uses for these tasks
    same.executable = partial(same.executable, default=sys.executable)  # it may have an interpreter of its own
    return same


# --- the command that starts a task (`CLIArgs`) -------------------------------------------------------


def num_nodes_told(cli_args: Any) -> int | None:
    """Return the gang's number of nodes from the command that starts its control task; None if unknown."""
    count: int | None = getattr(cli_args.task.ubf_iter, "num_parallel", None)
    return count


def change_pod(cli_args: Any, script: str) -> None:
    """Make a pod's shell run `script` first, and then the user's own script; start a gang of one as an ordinary pod.

    Metaflow makes no job set of one pod.
    """
    cli_args.env[_POD_SCRIPT] = script + (_OWN_SCRIPT or "true")
    if cli_args.command_options.get("num-parallel") == "1":
        del cli_args.command_options["num-parallel"]


# --- in a task ----------------------------------------------------------------------------------------


def num_parallel(flow: Any) -> int:
    """Return the number of nodes of this task's gang; raise `ValueError` where the flow gave none that can be one.

    Metaflow (2.19) takes any number, and ignores one below 1.
    """
    count = getattr(getattr(flow, "_parallel_ubf_iter", None), "num_parallel", None)
    if type(count) is not int:
        raise ValueError("is below 1" if count is None else f"is {count!r}")
    return count


def make_gang_of_one(flow: Any) -> None:
    """Set the number of nodes to 1: `spin` starts one task, but with the number of nodes of the original run."""
    from metaflow.flowspec import ParallelUBF

    flow._parallel_ubf_iter = ParallelUBF(1)


def set_tasks_of_one(flow: Any, task: str) -> None:
    """Set the fields of a control task that Metaflow's join reads, for an ordinary pod that is the whole gang."""
    flow._control_mapper_tasks = [task]
    flow._control_task_is_mapper_zero = True


def tasks_of(flow: Any) -> Sequence[str]:
    """Return the tasks of all nodes in order, each as run, step and task; only the control node has them."""
    tasks: Sequence[str] = getattr(flow, "_control_mapper_tasks", ())
    return tasks


def forget_tasks(flow: Any, nodes: Collection[int]) -> None:
    """Have Metaflow's join go on without the tasks of some nodes: it takes what this artifact lists (runtime.py, 2.19)."""
    tasks = enumerate(flow._control_mapper_tasks)
    flow._control_mapper_tasks = [task for node, task in tasks if node not in nodes]


def forgive_local_nodes(nodes: Collection[int]) -> None:
    """Wait for the ends of the tasks of some nodes, after which Metaflow takes them to have ended well."""
    for node, task in enumerate(tasks_of_local_nodes(), 1):
        if node in nodes:
            task.wait()
            task.returncode = 0


def tasks_of_local_nodes(error: BaseException | None = None) -> list[Any]:
    """Return the processes of the other nodes' tasks, in order, if Metaflow has started them from this one.

    On a local run ``_local_multinode_control_task_step_func`` (parallel_decorator.py, 2.13 and 2.19) starts them, runs the
    step, and waits for them. Its frame holds them: it is on the stack, or on that of `error`, which has ended the step.
    """
    tasks: list[Any] = []
    for frame, _ in walk_stack(None) if error is None else walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_local_multinode_control_task_step_func":
            tasks = list(frame.f_locals.get("subprocesses", ()))
    return tasks


def offer(name: str, thing: Any) -> None:
    """Add `thing` to ``current`` for the step's code."""
    current._update_env({name: thing})
