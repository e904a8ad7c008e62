"""The object behind ``current.torch``, and its sibling for steps of a single node."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, overload

from metaflow import current

from .console import write_output
from .devices import Machine, Nproc, choose_nproc, this_machine
from .errors import LaunchFailed, LaunchTimeout, TorchrunError, TorchrunPreempted
from .events import Event, Subscriber, to_log
from .facts import node_facts
from .failure import Cause
from .function_call import FunctionCall, refuse_for_functions, refuse_for_scripts
from .joining import LOOPBACK, sit_alone
from .launch_spec import LaunchSpec, Request, build_spec
from .membership import Membership
from .policy import LaunchPolicy, parse_retry_on, parse_signal
from .preflight import as_preflight, preflight_spec, shm_bytes, shm_warning
from .report import View, end_with, print_errors_ourselves, report
from .result import TorchrunResult
from .settings import DEFAULTS, StepSettings, parse_seconds, parse_settings
from .supervisor import Supervisor
from .transfer import ValueStore

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

# Arguments of metaflow-torchrun 0.2 that it took and ignored.
_IGNORED = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_warned_lock = threading.Lock()
_warned: set[str] = set()


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments that all kinds of `run` have, for type checkers; `TorchrunExecutor.run` tells what they mean."""

    module: bool
    env: Mapping[str, Any] | None
    cwd: str | None
    timeout_s: float | None
    master_port: int | str | None
    max_restarts: int | None
    retry_on: str | Iterable[str] | None
    hang_timeout_s: float | None
    preemption_signal: str | int | None
    init: Literal["gloo", "nccl", "auto"] | None
    gather: bool
    push_results_dir_to_cloud: Any
    local_output_dir: Any
    cloud_output_dir: Any


class RunOptions(LaunchOptions, total=False):
    """The keyword arguments of `TorchrunExecutor.run`."""

    nproc_per_node: int | str | None
    torchrun_args: Mapping[str, Any] | Sequence[Any] | None


@dataclass(frozen=True)
class Context:
    """What a node knows when its step's code begins.

    Attributes
    ----------
    seat : Membership
        Its place in the gang.
    main_addr : str
        Address of the control node as this node reaches it.
    machine : Machine
        What this node may use.
    settings : StepSettings
        The step's attributes.
    requested : Nproc or None
        What the resources of a remote task amount to.
    flow_dir : str or None
        Folder of the flow file.
    deadline : float or None
        When the step's ``@timeout`` ends, in monotonic seconds; only the control node needs it.
    store : ValueStore or None
        Carries the values of functions between nodes; None for a gang of one.
    """

    seat: Membership
    main_addr: str
    machine: Machine
    settings: StepSettings
    requested: Nproc | None = None
    flow_dir: str | None = None
    deadline: float | None = None
    emit: Subscriber = to_log
    store: ValueStore | None = None


def _also_as_in_0_2(run: F) -> F:
    """Take positional arguments in the order of metaflow-torchrun 0.2, too, where torchrun_args came first."""
    names = ("torchrun_args", "entrypoint", "entrypoint_args", "nproc_per_node", *_IGNORED)

    @functools.wraps(run)
    def either(self: TorchrunExecutor, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], Mapping | list | tuple) and len(args) <= len(names):
            return run(self, **dict(zip(names, args, strict=False)), **options)
        return run(self, *args, **options)

    return cast("F", either)


class StepTimeout:
    """The step's ``@timeout``, taken over from Metaflow so that it ends the gang in order.

    Metaflow's handler raises wherever the main thread is, and puts the stack there into its headline
    (`TimeoutDecorator` in ``metaflow/plugins/timeout_decorator.py``, 2.19). It has none on a control node.

    Attributes
    ----------
    seat : Membership or None
        Who is told; None while the node waits for its gang.
    """

    def __init__(self) -> None:
        self.seat: Membership | None = None
        self._former = signal.getsignal(signal.SIGALRM)
        owner = getattr(self._former, "__self__", None)
        if getattr(owner, "name", None) == "timeout" and threading.current_thread() is threading.main_thread():
            self._text = f"longer than the step's @timeout of {getattr(owner, 'secs', 0)} s allows"
            signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self.seat is None:
            raise LaunchTimeout(f"The node waited for its gang {self._text}.")
        self.seat.time_out(self._text)

    def end(self) -> None:
        """Give the alarm back to Metaflow."""
        if signal.getsignal(signal.SIGALRM) == self._on_alarm:
            signal.signal(signal.SIGALRM, self._former)


class TorchrunExecutor:
    """Starts torchrun on every node of the gang and looks after it; offered as ``current.torch``.

    Attributes
    ----------
    num_nodes : int
        Nodes of the gang.
    node_index : int
        This node, from 0.
    nproc_per_node : int
        Processes per node, unless a call of `run` says otherwise.
    world_size : int
        Processes over all nodes, unless a call of `run` says otherwise.
    main_addr : str
        Address of the control node as this node reaches it.
    is_control : bool
        Whether this is the control node, which hosts rank 0.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._preflight_due = context.settings.preflight

    @property
    def num_nodes(self) -> int:
        """Nodes of the gang."""
        return self._context.seat.num_nodes

    @property
    def node_index(self) -> int:
        """This node, from 0; the same as ``current.parallel.node_index``."""
        return self._context.seat.node

    @property
    def nproc_per_node(self) -> int:
        """Processes per node, unless a call of `run` says otherwise."""
        return self._choose_nproc(()).value

    @property
    def world_size(self) -> int:
        """Processes over all nodes, unless a call of `run` says otherwise."""
        return self.num_nodes * self.nproc_per_node

    @property
    def main_addr(self) -> str:
        """Address of the control node as this node reaches it."""
        return self._context.main_addr

    @property
    def is_control(self) -> bool:
        """Whether this is the control node, which hosts rank 0."""
        return self.node_index == 0

    @overload
    def run(
        self,
        entrypoint: Callable[..., T],
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> TorchrunResult[T]: ...

    @overload
    def run(
        self,
        entrypoint: str | os.PathLike[str] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> TorchrunResult[None]: ...

    @_also_as_in_0_2
    def run(
        self,
        entrypoint: str | os.PathLike[str] | Callable[..., Any] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        nproc_per_node: int | str | None = None,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        module: bool = False,
        env: Mapping[str, Any] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        master_port: int | str | None = None,
        max_restarts: int | None = None,
        retry_on: str | Iterable[str] | None = None,
        hang_timeout_s: float | None = None,
        preemption_signal: str | int | None = None,
        init: Literal["gloo", "nccl", "auto"] | None = None,
        gather: bool = False,
        push_results_dir_to_cloud: Any = None,
        local_output_dir: Any = None,
        cloud_output_dir: Any = None,
    ) -> TorchrunResult[Any]:
        """Run a script or a function under torchrun on all nodes and wait until all of them are done.

        Every node must call it, in the same order, with settings that agree.

        Parameters
        ----------
        entrypoint : Union[str, os.PathLike[str], Callable[..., Any]]
            The script; a relative path is looked for in `cwd` (or the working directory), then
            beside the flow file. With `module`, the name of a module. Or a function, which every rank calls:
            one of the flow file or of a module, a method, a `functools.partial`; with cloudpickle
            installed, a lambda or closure, too.
        entrypoint_args : Union[Mapping[str, Any], Sequence[Any]], optional
            The script's arguments. In a dict, None or ``""`` makes a bare flag, True and False are
            ``true`` and ``false``, lists and dicts are JSON, everything else is its `str`. A list is
            passed as it is. For a function: a dict of its keyword arguments or a list of its positional ones,
            anything that can be pickled.
        nproc_per_node : Union[int, str], optional
            Processes on each node, or ``"auto"``, ``"cpu"`` or ``"gpu"``. Default: ``torchrun_args``, the
            attribute of ``@torchrun``, the accelerators requested by ``@kubernetes`` or ``@batch``, those
            visible on this machine, or 1.
        torchrun_args : Union[Mapping[str, Any], Sequence[Any]], optional
            Further options of torchrun, as in ``{"max_restarts": 3}`` or ``["--max-restarts=3"]``.
        module : bool, default False
            Run `entrypoint` as ``python -m``.
        env : Mapping[str, Any], optional
            Environment variables for the workers.
        cwd : str, optional
            Their working directory. Default: the task's own.
        timeout_s : float, optional
            Seconds the launch may take once all nodes are ready, counted anew for each restart. Default: no
            limit of its own; the step's ``@timeout`` always bounds the whole.
        master_port : Union[int, str], optional
            Port of the rendezvous on the control node. Default: the kernel chooses.
        max_restarts : int, optional
            How often all workers of all nodes are started again after one failed. Default: the
            attribute of ``@torchrun``.
        retry_on : Union[str, Iterable[str]], optional
            Which classes of causes restart the gang: ``"user"``, an error of the script; ``"killed"``, a
            signal or lack of memory; ``"timeout"``, a launch over its time; ``"hang"``; ``"start"``, an
            agent that could not start. Default: the attribute of ``@torchrun``.
        hang_timeout_s : float, optional
            Seconds without any output or exit of any rank after which the launch counts as hanging: the
            stacks of all workers go to the logs and to files, then all is stopped. Default: the
            attribute of ``@torchrun``.
        preemption_signal : Union[int, str], optional
            What the workers get, once, when a node is preempted. Default: the attribute of ``@torchrun``.
        init : Literal["gloo", "nccl", "auto"], optional
            Of a function: make this process group before the call and end it after, with the rank's own device
            set; ``"auto"`` is nccl where each rank has a CUDA device, else gloo. Default: none is made.
        gather : bool, default False
            Of a function: bring the values of all ranks to the control node's result, through Metaflow's
            datastore.
        push_results_dir_to_cloud, local_output_dir, cloud_output_dir : optional
            Accepted for ``metaflow-torchrun`` 0.2, which ignores them too.

        Returns
        -------
        TorchrunResult
            Facts of the launch, and what a function has returned on this node's ranks.

        Raises
        ------
        Exception
            Of a function: what the first rank to fail has raised, as it was, on every node, with the gang's
            verdict as its cause and rank and node in its notes.
        WorkerFailed
            If that can't be pickled, or a returned value can't.
        TorchrunConfigError
            If an argument is wrong or contradicts another.
        EntrypointError
            If there is no such script.
        TorchNotFoundError
            If PyTorch is not installed.
        LaunchFailed
            If any worker, agent or node failed: the same error on every node, naming the first.
        GangError
            If the nodes could not agree or not all of them came.
        """
        self._context.seat.refuse_in_child()  # before any lock, which a thread of the task may hold for ever here
        legacy = (push_results_dir_to_cloud, local_output_dir, cloud_output_dir)
        self._warn_of_ignored(dict(zip(_IGNORED, legacy, strict=True)))
        context = self._context
        request = Request(
            entrypoint,
            entrypoint_args,
            torchrun_args,
            nproc_per_node,
            module,
            env,
            cwd,
            master_port,
            max_restarts,
            context.settings.master_port,
            context.flow_dir,
            context.settings.all_nodes_started_timeout,
        )
        if not callable(entrypoint):
            refuse_for_scripts(init, gather)
            spec, nproc = self._spec(request)
            policy = self._policy(spec, timeout_s, retry_on, hang_timeout_s, preemption_signal)
            return self._run(spec, nproc, policy)
        refuse_for_functions(request)
        with FunctionCall(entrypoint, entrypoint_args, init, gather, context.store) as call:
            request.entrypoint, request.entrypoint_args = call.command
            spec, nproc = self._spec(request)
            spec = call.fit(spec)
            policy = self._policy(spec, timeout_s, retry_on, hang_timeout_s, preemption_signal)
            return self._run(spec, nproc, policy, call)

    def _spec(self, request: Request) -> tuple[LaunchSpec, Nproc]:
        """Return the launch that is asked for, and why it has so many processes."""
        nproc = self._choose_nproc(request.nproc_settings())
        spec = build_spec(
            request,
            nproc=nproc.value,
            num_nodes=self.num_nodes,
            node_index=self.node_index,
            python=sys.executable,
            main_addr=self.main_addr,
        )
        if request.max_restarts is None and "max-restarts" not in request.options:
            spec = replace(spec, max_restarts=self._context.settings.max_restarts)
        return spec, nproc

    def _run(
        self, spec: LaunchSpec, nproc: Nproc, policy: LaunchPolicy, call: FunctionCall | None = None
    ) -> TorchrunResult[Any]:
        facts = node_facts(spec, self._context.machine)
        self._context.emit(Event("chosen", self.node_index, f"processes per node: {nproc.value} ({nproc.why})"))
        self._look_at_shm(nproc.value)
        if self._preflight_due:
            self._preflight(spec, facts, policy)
            self._preflight_due = False
        return self._launch(spec, facts, policy, call)

    def _preflight(self, spec: LaunchSpec, facts: Mapping[str, Any], policy: LaunchPolicy) -> None:
        """Measure the network that `spec` will use; a launch of its own, which restarts nothing."""
        if spec.world_size == 1:
            self._note("preflight: one process in all, so there is nothing to measure")
            return
        self._note(f"preflight: measures the network between {spec.world_size} ranks before the script starts")
        try:
            self._launch(preflight_spec(spec), facts, LaunchPolicy(preemption_signal=policy.preemption_signal))
        except TorchrunPreempted:
            raise
        except LaunchFailed as error:
            raise as_preflight(error) from error

    def _launch(
        self, spec: LaunchSpec, facts: Mapping[str, Any], policy: LaunchPolicy, call: FunctionCall | None = None
    ) -> TorchrunResult[Any]:
        context, deadline = self._context, self._context.deadline
        left_s = None if deadline is None else max(0.1, deadline - time.monotonic())
        supervisor = Supervisor(
            spec,
            context.seat,
            self.main_addr,
            context.machine,
            replace(policy, left_s=left_s),
            context.settings.grace_s,
            context.settings.heartbeat_timeout_s,
            facts,
            write_output,
            call,
        )
        try:
            return supervisor.run()
        except LaunchFailed as error:
            if call is None:
                raise
            original = call.original(error, supervisor.deposits)
            if original is error:
                raise
            raise original from error

    def _look_at_shm(self, nproc: int) -> None:
        """Warn once if this node's shared memory is small for what it runs."""
        warning = shm_warning(shm_bytes(), nproc, self._context.machine.accelerators, os.environ)
        if warning is not None and _is_first("/dev/shm"):  # noqa: S108 - a name, not a temporary file
            self._note(warning)

    def _note(self, text: str) -> None:
        self._context.emit(Event("note", self.node_index, text))

    def _policy(
        self, spec: LaunchSpec, timeout_s: Any, retry_on: Any, hang_timeout_s: Any, preemption_signal: Any
    ) -> LaunchPolicy:
        """Return what this call says, and what it leaves out from the step's attributes."""
        settings = self._context.settings
        retried = parse_retry_on(retry_on, "run(retry_on=...)")
        hang = parse_seconds(hang_timeout_s, "run(hang_timeout_s)")
        return LaunchPolicy(
            timeout_s=parse_seconds(timeout_s, "run(timeout_s)"),
            hang_timeout_s=settings.hang_timeout_s if hang is None else hang,
            max_restarts=spec.max_restarts if spec.min_nodes is None else 0,  # an elastic agent restarts by itself
            min_nodes=spec.min_nodes,
            retry_on=settings.retry_on if retried is None else retried,
            preemption_signal=parse_signal(preemption_signal, "run(preemption_signal)") or settings.preemption_signal,
        )

    def _choose_nproc(self, call_settings: Sequence[tuple[str, int | str | None]]) -> Nproc:
        context = self._context
        attribute = ("@torchrun(nproc_per_node)", context.settings.nproc_per_node)
        return choose_nproc([*call_settings, attribute], context.requested, context.machine)

    def _warn_of_ignored(self, given: Mapping[str, Any]) -> None:
        names = [name for name, value in given.items() if value and _is_first(name)]
        if names:
            text = f"warning: run({', '.join(names)}) has no effect; store outputs as artifacts or with @checkpoint instead"
            self._note(text)


class TorchrunSingleNodeMultiGPU:
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node.
    """

    @overload
    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None,
        entrypoint: Callable[..., T],
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Unpack[LaunchOptions],
    ) -> TorchrunResult[T]: ...

    @overload
    def run(
        self,
        *,
        entrypoint: Callable[..., T],
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Unpack[LaunchOptions],
    ) -> TorchrunResult[T]: ...

    @overload
    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: str | os.PathLike[str] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Unpack[LaunchOptions],
    ) -> TorchrunResult[None]: ...

    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: str | os.PathLike[str] | Callable[..., Any] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Any,
    ) -> TorchrunResult[Any]:
        """Run a script or a function under torchrun on this machine and wait for its end.

        Parameters
        ----------
        torchrun_args, entrypoint, entrypoint_args, nproc_per_node : optional
            As for `TorchrunExecutor.run`; their order is that of ``metaflow-torchrun`` 0.2.
        **options
            Its other arguments.

        Returns
        -------
        TorchrunResult
            Facts of the launch.

        Raises
        ------
        TorchrunError
            As `TorchrunExecutor.run`.
        """
        settings = parse_settings(DEFAULTS, "TorchrunSingleNodeMultiGPU")
        seat = sit_alone(settings, to_log)
        timeout = StepTimeout()
        timeout.seat = seat
        error: BaseException | None = None
        try:
            executor = TorchrunExecutor(Context(seat, LOOPBACK, this_machine(), settings, flow_dir=flow_folder()))
            run: Callable[..., TorchrunResult[Any]] = executor.run  # which overload is this class's caller's to know
            return run(
                entrypoint, entrypoint_args, nproc_per_node=nproc_per_node, torchrun_args=torchrun_args, **options
            )
        except BaseException as caught:
            error = caught
            if isinstance(caught, TorchrunError) and seat.gang_knows(caught) and current.get("is_parallel"):
                rename_node(caught, current.parallel.node_index)
            print_errors_ourselves(in_task=True)
            end_with(caught, report(caught, View(seat.node, shared=True, known=False, live=seat.shows_output)))
            raise
        finally:
            timeout.end()
            seat.leave(error)


def rename_node(error: TorchrunError, node: int) -> None:
    """Have an error of a gang of one, whose node is 0, speak of the node that it is in the gang around it."""
    if error.cause is None:
        return
    before = Cause.from_wire(error.cause)
    after = replace(before, node=node)
    # Without the first letter, which is large where a sentence begins.
    error.message = error.message.replace(before.who[1:], after.who[1:])
    error.cause = after.to_wire()


def _is_first(warning: str) -> bool:
    """Tell whether this task gives this warning for the first time."""
    with _warned_lock:
        known = warning in _warned
        _warned.add(warning)
    return not known


def flow_folder() -> str | None:
    """Return the folder of the flow file, which is the program that Metaflow runs."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else None
