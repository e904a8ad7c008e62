"""``@torchrun``: Metaflow's lifecycle, wired to the rest."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from metaflow import current
from metaflow.metaflow_config import KUBERNETES_SANDBOX_INIT_SCRIPT
from metaflow.plugins.parallel_decorator import ParallelDecorator
from metaflow.unbounded_foreach import UBF_CONTROL
from metaflow.user_configs.config_parameters import UNPACK_KEY

from .address_book import AddressBook
from .channel import ControlChannel
from .devices import Nproc, requested_accelerators, this_machine
from .events import Event, Subscriber, to_log
from .executor import Context, StepTimeout, TorchrunExecutor, flow_folder
from .interrupts import heed_signals_to_job, heed_signals_to_run
from .joining import LOOPBACK, control_addresses, join_as_control, join_as_member, sit_alone
from .local_nodes import STARTED_BY, LocalNodes, SameInterpreter, end_after, name_as_starter, starters
from .membership import Membership
from .preemption import heed_sigterm_in_pod, pod_is_told_to_stop, pod_script, spot_notice, watch
from .report import View, end_with, print_errors_ourselves, report
from .settings import DEFAULTS, StepSettings, parse_settings, refuse_unknown
from .submit_checks import Submission, ignored_by_with
from .task_log import TaskLog
from .tracebacks import cut_frames_around
from .value_store import DatastoreValues

# How long a failed node holds its end until the control node's log has the cause, and how long that may
# take to upload it: on Kubernetes the first pod that ends takes all with it.
_HOLD_S = 10.0
_UPLOAD_S = 5.0
# What a pod's shell runs first (KUBERNETES_SANDBOX_INIT_SCRIPT in metaflow_config.py, 2.19).
_POD_SCRIPT = "METAFLOW_KUBERNETES_SANDBOX_INIT_SCRIPT"
# What a node's task needs beyond its workers' grace to end by itself.
_LOCAL_NODE_MARGIN_S = 10.0
# What a local task has to end by itself when the run's process is gone. Nobody reads its output any more.
_ORPHAN_S = 1.5

heed_sigterm_in_pod()  # here, since Metaflow imports this before it starts any process


class TorchrunDecorator(ParallelDecorator):  # type: ignore[misc]  # Metaflow is not typed
    """Turns the tasks of this step into the nodes of one PyTorch job.

    The step must be entered with ``self.next(self.train, num_parallel=N)``. In it,
    ``current.torch.run(entrypoint, entrypoint_args)`` starts torchrun on every node and looks after
    it: when one worker fails, all nodes stop and raise the same error, which names it.

    Parameters
    ----------
    nproc_per_node : Union[int, str], optional, default None
        Processes on each node, or ``"auto"``, ``"cpu"`` or ``"gpu"``. By default the GPUs that
        ``@kubernetes``, ``@batch`` and ``@resources`` request, or those visible on this machine, or 1.
    all_nodes_started_timeout : float, default 600
        Seconds to wait until all nodes have started.
    master_port : int, optional, default None
        Port of the rendezvous on the control node. By default the kernel chooses a free one.
    channel_port : int, optional, default None
        Port on the control node through which the nodes agree. By default the kernel chooses.
    heartbeat_timeout_s : float, default 30
        Seconds of silence after which a node counts as lost.
    grace_s : float, default 30
        Seconds that workers have between SIGTERM and SIGKILL.
    max_restarts : int, default 0
        How often all workers are started again on all nodes after one of them failed.
    retry_on : Union[str, Iterable[str]], optional, default None
        Which classes of causes restart them: ``"user"``, an error of the script; ``"killed"``, a signal or
        lack of memory; ``"timeout"``, a launch over its time; ``"hang"``; ``"start"``, an agent that could
        not start. By default all but ``"start"``. A lost node and a preemption never do: for these,
        Metaflow's ``@retry`` brings a new gang.
    preemption_signal : Union[int, str], default "SIGTERM"
        What the workers get, once, when a node is told to stop or its machine is taken away. They have
        ``grace_s`` seconds to save.
    hang_timeout_s : float, optional, default None
        Seconds without any output or exit of any rank after which a launch counts as hanging: the stacks
        of all workers go to the logs and to files, then all is stopped. None does not look.
    preflight : bool, default False
        Whether to measure the network before the step's first launch: latency and bandwidth of each
        node's links and of an all-reduce over all ranks. A slow node is named in a warning, one that can't take part in the
        error. It is a launch of its own and takes the first number.

    MF Add To Current
    -----------------
    torch -> metaflow_extensions.torchrun.plugins.torchrun.executor.TorchrunExecutor
        Starts torchrun on all nodes of this step, and knows the facts of the gang.

        @@ Returns
        -------
        TorchrunExecutor
            An object with the method `run` and the read-only facts `num_nodes`, `node_index`,
            `nproc_per_node`, `world_size`, `main_addr` and `is_control`.
    """

    name = "torchrun"
    defaults = DEFAULTS
    IS_PARALLEL = True
    # `spin` of another step makes a package without step_init (Metaflow 2.19).
    _submission: Submission | None = None
    _siblings: Sequence[Any] = ()

    def __init__(self, attributes: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        # Metaflow would refuse unknown attributes here, before it knows which step they stand at.
        given = attributes or {}
        self._unknown = [key for key in given if key not in DEFAULTS and not key.startswith(UNPACK_KEY)]
        super().__init__({key: value for key, value in given.items() if key not in self._unknown}, *args, **kwargs)

    def step_init(
        self, flow: Any, graph: Any, step_name: str, decos: Any, environment: Any, flow_datastore: Any, logger: Any
    ) -> None:
        """Check everything that can be checked before anything is scheduled."""
        print_errors_ourselves(in_task=False)
        super().step_init(flow, graph, step_name, decos, environment, flow_datastore, logger)
        self._flow_datastore = flow_datastore
        for option in ignored_by_with(self.name) if self.statically_defined else ():
            logger(
                f"Step {step_name}: {option} is ignored, because its @torchrun stands in the source. Change it there."
            )
        refuse_unknown(self._unknown, step_name)
        self._settings: StepSettings = parse_settings(self.attributes, step_name)
        self._requested: Nproc | None = requested_accelerators([(d.name, d.attributes) for d in decos])
        self._timeout_s: float | None = next((float(d.secs) for d in decos if d.name == "timeout"), None)
        self._siblings = decos
        self._seat: Membership | None = None
        self._channel: ControlChannel | None = None
        self._local_nodes: LocalNodes | None = None
        self._preemption_watch: threading.Event | None = None
        self.environment = SameInterpreter(environment)
        _take_over_plain_parallel(decos)
        metadata_type = getattr(flow_datastore.metadata, "TYPE", None)
        self._submission = Submission(flow, graph, step_name, self._settings.master_port, metadata_type)
        self._submission.check_kubernetes()
        heed_signals_to_job()

    def package_init(self, flow: Any, step_name: str, environment: Any) -> None:
        """Check again; `argo-workflows create` adds ``@kubernetes`` after `step_init` (Metaflow 2.19)."""
        super().package_init(flow, step_name, environment)
        if self._submission is not None:
            self._submission.check_kubernetes()

    def runtime_init(self, flow: Any, graph: Any, package: Any, run_id: str) -> None:
        """Check what only a run can do; deployments, tasks and commands such as ``show`` don't come here."""
        super().runtime_init(flow, graph, package, run_id)
        heed_signals_to_run()
        if self._submission is not None:
            self._submission.check_batch()

    def runtime_step_cli(
        self, cli_args: Any, retry_count: int, max_user_code_retries: int, ubf_context: str | None
    ) -> None:
        """Check what depends on the number of nodes; called on the submitting machine, right before the start."""
        super().runtime_step_cli(cli_args, retry_count, max_user_code_retries, ubf_context)
        if self._submission is not None and ubf_context == UBF_CONTROL:
            self._submission.check_nodes(cli_args.task.ubf_iter.num_parallel)
        on_kubernetes = any(deco.name == "kubernetes" for deco in self._siblings)
        if on_kubernetes and cli_args.command_options.get("num-parallel") == "1":
            # Metaflow 2.19 refuses to make a job set of one (kubernetes_cli.py); an ordinary pod will do.
            del cli_args.command_options["num-parallel"]
        if on_kubernetes:
            cli_args.env[_POD_SCRIPT] = pod_script(KUBERNETES_SANDBOX_INIT_SCRIPT or "")
        name_as_starter(cli_args.env, "run")

    def task_pre_step(
        self,
        step_name: str,
        task_datastore: Any,
        metadata: Any,
        run_id: str,
        task_id: str,
        flow: Any,
        graph: Any,
        retry_count: int,
        max_user_code_retries: int,
        ubf_context: str | None,
        inputs: Any,
    ) -> None:
        """Note which gang this is."""
        super().task_pre_step(
            step_name,
            task_datastore,
            metadata,
            run_id,
            task_id,
            flow,
            graph,
            retry_count,
            max_user_code_retries,
            ubf_context,
            inputs,
        )
        if ubf_context is None and flow._parallel_ubf_iter.num_parallel == 1:
            # An ordinary pod as the whole gang: say what Metaflow's join asks of a control task (2.19).
            flow._control_mapper_tasks = [f"{run_id}/{step_name}/{task_id}"]
            flow._control_task_is_mapper_zero = True
        print_errors_ourselves(in_task=True)
        self._watch_storing(task_datastore)
        self._run_id, self._step, self._task_id, self._attempt = run_id, step_name, task_id, retry_count
        if _is_local():
            followed = {"run": self._run_is_gone, "control": self._control_task_is_gone}
            for role, pid in starters(os.environ).items():
                end_after(pid, followed[role])

    def _run_is_gone(self, pid: int) -> float:
        """Take the news that nobody waits for this task any more, or reads its output."""
        if self._seat is None:
            return 0.0
        self._seat.notice(f"the process of the run (pid {pid}) is gone")
        return _ORPHAN_S

    def _control_task_is_gone(self, pid: int) -> float:
        if self._seat is not None:  # its channel tells it; what its workers still write is read
            return self._settings.grace_s + _LOCAL_NODE_MARGIN_S
        text = f"the control task (pid {pid}), which has started this one, is gone; this one ends, too"
        to_log(Event("note", current.parallel.node_index, text))
        return 0.0

    def task_decorate(
        self,
        step_func: Callable[[], None],
        flow: Any,
        graph: Any,
        retry_count: int,
        max_user_code_retries: int,
        ubf_context: str | None,
    ) -> Callable[[], None]:
        """Join the gang before the step's code and leave it after, whatever happens in between."""
        if retry_count > max_user_code_retries:
            return step_func  # @catch's fallback runs instead of the step's code, on no gang

        def step_to_its_end() -> None:
            step_func()
            # On a local run Metaflow waits in `inner` for the other nodes' tasks: they have to know before.
            if self._seat is not None:
                self._seat.finish()

        inner = super().task_decorate(step_to_its_end, flow, graph, retry_count, max_user_code_retries, ubf_context)
        if ubf_context == UBF_CONTROL and _is_local():
            self._local_nodes = LocalNodes(str(self._run_id), str(self._task_id), flow._parallel_ubf_iter.num_parallel)

        def with_gang() -> None:
            if self._local_nodes is not None:
                name_as_starter(os.environ, "control")
            try:
                inner()
                self._await_others()
            except BaseException as error:
                if self._seat is not None and not self._seat.in_task:
                    raise  # a child that the step has forked and that went on with the step's code
                signal.alarm(0)  # the step's @timeout is for its code
                self._report(error)
                self._leave(error)
                if self._local_nodes is not None:
                    absent = self._channel.gang.absent if self._channel is not None else ()
                    self._local_nodes.stop(self._settings.grace_s + _LOCAL_NODE_MARGIN_S, absent)
                raise
            if self._channel is not None:
                self._leave(None)

        return with_gang

    def task_exception(
        self,
        exception: BaseException,
        step_name: str,
        flow: Any,
        graph: Any,
        retry_count: int,
        max_user_code_retries: int,
    ) -> Any:
        """Tell the gang of an exception after the step's code, in another decorator; handling it is left to others.

        Frames of ours are left out of what Metaflow keeps of it.
        """
        cut_frames_around(exception)
        self._fail(exception)
        return super().task_exception(exception, step_name, flow, graph, retry_count, max_user_code_retries)

    def task_finished(
        self, step_name: str, flow: Any, graph: Any, is_task_ok: bool, retry_count: int, max_user_code_retries: int
    ) -> None:
        """Leave the gang for good: Metaflow has stored this node's results."""
        super().task_finished(step_name, flow, graph, is_task_ok, retry_count, max_user_code_retries)
        # What Metaflow does not hand to `task_exception`, such as SystemExit, is on its way through `run_step`.
        self._leave(None if is_task_ok else sys.exc_info()[1])

    def setup_distributed_env(self, flow: Any) -> None:
        """Join the gang and offer ``current.torch``; called right before the step's code."""
        os.environ.pop(STARTED_BY, None)  # meant for tasks alone, not for what the step's code starts
        parallel = current.parallel
        here = parallel.num_nodes if _is_local() else 1
        machine = this_machine(here, parallel.node_index if here > 1 else 0)
        timeout = StepTimeout()
        seat, main_addr = self._join(parallel)
        self._seat = timeout.seat = seat
        if not _is_local():
            notice = current.get("spot_termination_notice")
            signs = [pod_is_told_to_stop] + ([spot_notice(notice)] if notice else [])
            self._preemption_watch = watch(signs, seat.notice)
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        context = Context(
            seat,
            main_addr,
            machine,
            self._settings,
            requested=None if _is_local() else self._requested,
            flow_dir=flow_folder(),
            deadline=deadline,
            store=DatastoreValues(self._flow_datastore) if parallel.num_nodes > 1 else None,
        )
        current._update_env({"torch": TorchrunExecutor(context)})

    def _join(self, parallel: Any) -> tuple[Membership, str]:
        self._log = TaskLog(self._open_store)
        emit: Subscriber = to_log if _is_local() else self._log.after(to_log)
        if parallel.num_nodes == 1:
            return sit_alone(self._settings, emit), LOOPBACK
        control_task_id = parallel.control_task_id or self._task_id
        book = AddressBook(self._flow_datastore, self._run_id, self._step, control_task_id, self._attempt)
        if parallel.node_index == 0:
            main_ip, here_only = parallel.main_ip, _is_local()
            seat, self._channel = join_as_control(book, parallel.num_nodes, main_ip, self._settings, emit, here_only)
            if self._local_nodes is not None:
                self._local_nodes.watch(self._channel.report_gone)
            return seat, control_addresses(main_ip, here_only)[0]
        return join_as_member(book, parallel.node_index, parallel.num_nodes, self._settings, emit)

    def _open_store(self) -> Any:
        return self._flow_datastore.get_task_datastore(
            self._run_id, self._step, self._task_id, attempt=self._attempt, mode="w"
        )

    def _await_others(self) -> None:
        """Keep the control node until the others have stored their results, and fail if one of them can't.

        On AWS Batch the control node's end stops all nodes, and nothing else makes another node's failure
        the run's (Metaflow 2.19 waits there for the others' ends only).
        """
        if self._seat is not None and self._channel is not None:
            gang = self._channel.gang
            self._seat.await_others(lambda: gang.members)

    def _leave(self, error: BaseException | None) -> None:
        if self._preemption_watch is not None:
            self._preemption_watch.set()
        if self._seat is not None:
            self._seat.leave(error, hold_s=0.0 if _is_local() or self._channel is not None else _HOLD_S)

    def _fail(self, error: BaseException) -> None:
        """Report an error after the step's code, and leave with it; nothing if the node has left."""
        if self._seat is not None and self._seat.is_storing:
            self._report(error)
            self._leave(error)

    def _watch_storing(self, task_datastore: Any) -> None:
        """Tell the gang of artifacts that can't be stored: then Metaflow calls no decorator any more (task.py, 2.19)."""
        for name in ("persist", "save_metadata", "done"):
            setattr(task_datastore, name, self._failing_with(getattr(task_datastore, name)))

    def _failing_with(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return store(*args, **kwargs)
            except Exception as error:
                self._fail(error)
                raise

        return watched

    def _report(self, error: BaseException) -> None:
        """Say what is to be shown of the error; a remote control node has it in its log at once.

        Metaflow prints it only after storing all artifacts, which can be too late there.
        """
        node = current.parallel.node_index
        known = self._seat is not None and self._seat.gang_knows(error)
        live = self._seat is not None and self._seat.shows_output
        text = report(error, View(node, _is_local(), known, live))
        if text is not None and self._channel is not None and self._seat is not None and not _is_local():
            self._seat.emit(Event("failed", node, text))
            self._log.save(_UPLOAD_S)
            text = f"{type(error).__name__}: see the report of [torchrun node {node}] above."
        end_with(error, text)


def _is_local() -> bool:
    # As metaflow.plugins.parallel_decorator tells it (2.19): remote systems set another value.
    return os.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local") == "local"


def _take_over_plain_parallel(decos: Sequence[Any]) -> None:
    """Keep a plain ``@parallel`` beside ``@torchrun`` from starting the nodes a second time."""
    for deco in decos:
        if type(deco) is ParallelDecorator:
            deco.task_decorate = lambda step_func, *_: step_func
