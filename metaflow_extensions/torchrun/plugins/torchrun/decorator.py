"""The decorator ``@torchrun``: connects Metaflow's lifecycle hooks with the gang.

Metaflow imports this module whenever it is imported itself, and most programs have no ``@torchrun`` step. So each method
imports what only it needs: a submitting process never loads the code of tasks, nor does the task of another step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from metaflow import current

from .compat import steps
from .compat.graph import check_first, is_ours
from .compat.renamed import check, harmless
from .settings import DEFAULTS, StepSettings, check_spares, parse_settings, refuse_unknown, with_parameters
from .task.signs import POD_SCRIPT, heed_sigterm_in_pod, name_as_starter
from .tracebacks import cut_frames_around

if TYPE_CHECKING:
    from .machine.accelerators import Nproc
    from .submit.checks import Submission
    from .task.task_gang import TaskGang

heed_sigterm_in_pod()  # here, since Metaflow imports this before it starts any process


class TorchrunDecorator(steps.ParallelDecorator):  # type: ignore[misc]  # Metaflow is not typed
    """Turns the tasks of this step into the nodes of one PyTorch job.

    The step must be entered with ``self.next(self.train, num_parallel=N)``. In it,
    ``current.torch.run(entrypoint, entrypoint_args)`` starts torchrun on every node and looks after
    it: when one worker fails, all nodes stop and raise the same error, which names it.

    An attribute is the default of its step. Where `run` has an argument of the same name, the argument overrides it.

    MF Add To Current
    -----------------
    torch -> metaflow_extensions.torchrun.plugins.torchrun.executor.TorchrunExecutor
        Starts torchrun on all nodes of this step, and knows the facts of the gang.

        @@ Returns
        -------
        TorchrunExecutor
            An object with the methods `run` and `card` and the read-only facts `num_nodes`, `node_index`,
            `nproc_per_node`, `world_size`, `main_addr` and `is_control`.
    """

    name = "torchrun"
    defaults = DEFAULTS
    IS_PARALLEL = True
    _gang: TaskGang | None = None  # in a task

    def __init__(self, attributes: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        check()
        # Metaflow would refuse unknown attributes here, before it knows which step they stand at.
        given = attributes or {}
        self._unknown = [key for key in given if key not in DEFAULTS and not key.startswith(steps.UNPACK_KEY)]
        super().__init__({key: value for key, value in given.items() if key not in self._unknown}, *args, **kwargs)

    def step_init(
        self, flow: Any, graph: Any, step_name: str, decos: Any, environment: Any, flow_datastore: Any, logger: Any
    ) -> None:
        """Check everything that can be checked before anything is scheduled."""
        from .compat.cards import take_control_task
        from .compat.datastore import metadata_type
        from .compat.graph import ignored_by_with
        from .machine.accelerators import requested_accelerators
        from .show.stored_gangs import place_of
        from .submit.checks import Submission
        from .submit.interrupts import heed_signals_to_job, remote_job
        from .task.report import print_errors_ourselves, tell_after_errors

        print_errors_ourselves(in_task=False)
        super().step_init(flow, graph, step_name, decos, environment, flow_datastore, logger)
        self._flow_datastore, self._step_name, self._graph = flow_datastore, step_name, graph
        for option in ignored_by_with(self.name) if getattr(self, "statically_defined", False) else ():
            logger(
                f"Step {step_name}: {option} is ignored, because the step has @torchrun in its source. Change it there."
            )
        # From mutators and configs, which Metaflow does not check (2.19).
        unknown = [key for key in self.attributes if key not in DEFAULTS]
        refuse_unknown([*self._unknown, *unknown], step_name)
        self._settings: StepSettings = parse_settings(self.attributes, step_name)
        self._requested: Nproc | None = requested_accelerators([(d.name, d.attributes) for d in decos])
        self._timeout_s = steps.timeout_of(decos)
        self._siblings = decos
        self.environment = steps.with_this_interpreter(environment)
        steps.leave_nodes_to_us(decos)
        metadata = metadata_type(flow_datastore)
        self._is_spun = metadata == "spin"
        if self._is_spun:  # its gang has one node
            self._settings = replace(self._settings, spare_nodes=0, min_nodes=None)
        self._submission: Submission = Submission(flow, graph, step_name, self._settings, metadata)
        self._submission.check()
        heed_signals_to_job()
        take_control_task(step_name, lambda task: place_of(task, {task})[1] == 0)
        if remote_job() == step_name:
            from .submit.jobs import Job

            self._submission.bring_pods_again()
            job = Job(flow_datastore, step_name)
            job.watch()  # logs what the backend says of pods that can't start, and of its end
            tell_after_errors(job.tell)

    def package_init(self, flow: Any, step_name: str, environment: Any) -> None:
        """Check again; `argo-workflows create` adds ``@kubernetes`` after `step_init` (Metaflow 2.19)."""
        super().package_init(flow, step_name, environment)
        if hasattr(self, "_submission"):  # `spin --skip-decorators` makes a package without `step_init`
            self._submission.check()
            self._submission.bring_pods_again()

    def add_to_package(self) -> Iterable[tuple[str, str]]:
        """Ship `metaflow_torchrun`, which the flow's own file may import: its folder is on the path of workers only."""
        from .supervisor.command import IMPORTABLE

        yield from super().add_to_package()
        name = os.path.join("metaflow_torchrun", "__init__.py")
        yield os.path.join(IMPORTABLE, name), name

    def runtime_init(self, flow: Any, graph: Any, package: Any, run_id: str) -> None:
        """Check what only a run can do; deployments, tasks and commands such as ``show`` don't come here."""
        from .compat.graph import parallel_steps
        from .compat.linux import require_linux
        from .show.stored_gangs import last_lines
        from .submit.interrupts import heed_signals_to_run
        from .task.report import tell_after_errors

        super().runtime_init(flow, graph, package, run_id)
        heed_signals_to_run()
        is_remote = any(deco.name in ("kubernetes", "batch") for deco in self._siblings)
        if not is_remote:
            require_linux(f"Step {self._step_name} with @torchrun")
        self._submission.check(is_run=True)
        is_only_gang = len(parallel_steps(graph)) == 1
        about = (self._flow_datastore, str(run_id), self._step_name, is_only_gang, is_remote)
        self._last_lines = partial(last_lines, *about)
        tell_after_errors(self._last_lines)

    def runtime_finished(self, exception: Any) -> None:
        """Write the last lines of a run that was interrupted: Metaflow prints no error then."""
        from .task.console import write

        super().runtime_finished(exception)
        if isinstance(exception, KeyboardInterrupt):
            write("stderr", self._last_lines(exception))

    def runtime_step_cli(
        self, cli_args: Any, retry_count: int, max_user_code_retries: int, ubf_context: str | None
    ) -> None:
        """Check what depends on the number of nodes; called on the submitting machine, right before the start."""
        super().runtime_step_cli(cli_args, retry_count, max_user_code_retries, ubf_context)
        if ubf_context == steps.UBF_CONTROL:
            self._submission.check(steps.num_nodes_told(cli_args), is_run=True)
        if any(deco.name == "kubernetes" for deco in self._siblings):
            steps.change_pod(cli_args, POD_SCRIPT)
        name_as_starter(cli_args.env, "run")

    def task_pre_step(self, *args: Any) -> None:
        """Record which gang this is."""
        from .compat.linux import require_linux

        require_linux("@torchrun")
        from .errors import TorchrunConfigError
        from .events import Event
        from .task.console import to_log
        from .task.report import print_errors_ourselves, tell_after_errors
        from .task.step_timeout import time_limit
        from .task.task_gang import TaskGang

        began_at = time.monotonic()
        step_name, task_datastore, _, run_id, task_id, flow, _, retry_count, _, ubf_context, *_ = args
        try:
            num_nodes = steps.num_parallel(flow)
        except ValueError as error:
            raise TorchrunConfigError(
                f"Step {step_name}: num_parallel {error}. Give self.next a whole number of nodes, at least 1."
            ) from None
        if self._is_spun:
            steps.make_gang_of_one(flow)
            to_log(Event("note", 0, f"spin runs this step on one node; in its run it had {num_nodes}"), num_nodes=1)
            # The inputs, whose names Metaflow tells other nodes, have none here (2.19).
            args = (*args[:10], [], *args[11:])
        super().task_pre_step(*args)
        if ubf_context == steps.UBF_CONTROL and steps.is_local():
            # Elsewhere it is there from the beginning, here Metaflow sets it when all decorators have come by (2.19). Those
            # above this one look for it: without it, @checkpoint takes the nodes for tasks that have nothing in common.
            os.environ["MF_PARALLEL_CONTROL_TASK_ID"] = str(task_id)
        if ubf_context is None and num_nodes == 1:
            # An ordinary pod as the whole gang.
            steps.set_tasks_of_one(flow, f"{run_id}/{step_name}/{task_id}")
        print_errors_ourselves(in_task=True)
        limit = {}
        if ubf_context in (steps.UBF_CONTROL, None) and self._timeout_s is not None:
            limit = time_limit(self._timeout_s, began_at, self._settings.grace_s)
        store, settings = self._flow_datastore, self._settings
        forget = partial(steps.forget_tasks, flow)
        self._gang = TaskGang(settings, store, (run_id, step_name, task_id, retry_count), limit, forget)
        self._gang.watch_storing(task_datastore)
        tell_after_errors(self._gang.leave)  # as of a metadata service that is down, of which no decorator hears

    def task_decorate(self, step_func: Callable[[], None], *args: Any) -> Callable[[], None]:
        """Join the gang before the step's code and leave it after, whatever happens in between."""
        _, _, retry_count, max_user_code_retries, ubf_context = args
        gang = self._gang
        if gang is None or retry_count > max_user_code_retries:
            return step_func  # @catch's fallback runs instead of the step's code, on no gang

        # On a local run Metaflow waits in `inner` for the other nodes' tasks: they have to know before that it has ended.
        inner = super().task_decorate(partial(gang.run_code, step_func), *args)
        if ubf_context == steps.UBF_CONTROL and steps.is_local():
            name_as_starter(os.environ, "control")
        return lambda: gang.run(inner)

    def task_exception(self, exception: BaseException, *args: Any) -> Any:
        """Report to the gang an exception after the step's code, in another decorator; it is not handled here."""
        cut_frames_around(exception)
        if self._gang is not None:
            self._gang.fail(exception)
        return super().task_exception(exception, *args)

    def setup_distributed_env(self, flow: Any) -> None:
        """Join the gang and offer ``current.torch``; called right before the step's code."""
        from .compat.datastore import DatastoreValues
        from .executor import TorchrunExecutor
        from .machine.accelerators import this_machine
        from .submit.run_calls import nproc_in_calls
        from .task.join import starts_of

        super().setup_distributed_env(flow)
        assert self._gang is not None
        check_spares(self._settings, current.parallel.num_nodes, self._step_name)
        parallel, here = current.parallel, steps.is_local()
        machine = this_machine(parallel.num_nodes, parallel.node_index) if here else this_machine()
        settings = self._settings
        if settings.warm != "off" and settings.nproc_per_node is None:
            # As the step's first launch will have it, as far as the source of the step tells.
            with harmless():  # it only makes a launch faster
                settings = replace(settings, nproc_per_node=nproc_in_calls(self._graph, self._step_name))
        starts = starts_of(settings, machine, None if here else self._requested)
        member, main_addr = self._gang.join(steps.tasks_of(flow), starts)
        requested, store = None if here else self._requested, DatastoreValues(self._flow_datastore)
        about = (member, main_addr, machine, self._settings, requested, store, self._gang.part)
        steps.offer("torch", TorchrunExecutor(*about))


TorchrunDecorator.__doc__ = with_parameters(TorchrunDecorator.__doc__, DEFAULTS)


def _check_source(graph: Any) -> None:
    """Check the source of a flow; called before Metaflow checks it, which is before `step_init`."""
    if is_ours(graph):
        from .submit.run_calls import check_source

        check_source(graph)


check_first(_check_source)
