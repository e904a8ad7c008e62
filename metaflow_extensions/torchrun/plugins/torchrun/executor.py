"""The object behind ``current.torch``, and its sibling for steps of a single node."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .console import write_output
from .devices import Machine, Nproc, choose_nproc, this_machine
from .errors import TorchNotFoundError
from .events import Event, Subscriber, to_log
from .joining import LOOPBACK, sit_alone
from .launch_spec import Request, build_spec, parse_retry_on
from .membership import Membership
from .result import TorchrunResult
from .settings import DEFAULTS, StepSettings, parse_seconds, parse_settings
from .supervisor import Supervisor

# Arguments of metaflow-torchrun 0.2 that it took and ignored.
_IGNORED = ("push_results_dir_to_cloud", "local_output_dir", "cloud_output_dir")
_warned_lock = threading.Lock()
_warned: set[str] = set()


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
    """

    seat: Membership
    main_addr: str
    machine: Machine
    settings: StepSettings
    requested: Nproc | None = None
    flow_dir: str | None = None
    deadline: float | None = None
    emit: Subscriber = to_log


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

    def run(
        self,
        entrypoint: str | os.PathLike[str] | None = None,
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
        retry_on: str | Sequence[str] | None = None,
        push_results_dir_to_cloud: Any = None,
        local_output_dir: Any = None,
        cloud_output_dir: Any = None,
    ) -> TorchrunResult:
        """Run a script under torchrun on all nodes and wait until all of them are done.

        Every node must call it, in the same order, with settings that agree.

        Parameters
        ----------
        entrypoint : str or path
            The script; a relative path is looked for in `cwd` (or the working directory), then
            beside the flow file. With `module`, the name of a module.
        entrypoint_args : dict or list, optional
            The script's arguments. In a dict, None or ``""`` makes a bare flag, True and False are
            ``true`` and ``false``, lists and dicts are JSON, everything else is its `str`. A list is
            passed as it is.
        nproc_per_node : int or {"auto", "cpu", "gpu"}, optional
            Processes on each node. Default: ``torchrun_args``, the attribute of ``@torchrun``, the
            accelerators requested by ``@kubernetes`` or ``@batch``, those visible on this machine,
            or 1.
        torchrun_args : dict or list, optional
            Further options of torchrun, as in ``{"max_restarts": 3}`` or ``["--max-restarts=3"]``.
        module : bool, default False
            Run `entrypoint` as ``python -m``.
        env : dict, optional
            Environment variables for the workers.
        cwd : str, optional
            Their working directory. Default: the task's own.
        timeout_s : float, optional
            Seconds the launch may take once all nodes are ready. Default: no limit of its own.
        master_port : int, optional
            Port of the rendezvous on the control node. Default: the kernel chooses.
        max_restarts : int, optional
            How often all workers of all nodes are started again after one failed. Default: the
            attribute of ``@torchrun``.
        retry_on : str or sequence of {"user", "killed", "start"}, optional
            Which classes of causes restart the gang: an error of the script, a signal or lack of memory,
            an agent that could not start. Default: the attribute of ``@torchrun``.
        push_results_dir_to_cloud, local_output_dir, cloud_output_dir : optional
            Accepted for ``metaflow-torchrun`` 0.2, which ignores them too.

        Returns
        -------
        TorchrunResult
            Facts of the launch.

        Raises
        ------
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
        legacy = (push_results_dir_to_cloud, local_output_dir, cloud_output_dir)
        self._warn_of_ignored(dict(zip(_IGNORED, legacy, strict=True)))
        context = self._context
        restarts_given = max_restarts is not None
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
        )
        nproc = self._choose_nproc(request.nproc_settings())
        spec = build_spec(
            request,
            nproc=nproc.value,
            num_nodes=self.num_nodes,
            node_index=self.node_index,
            python=sys.executable,
            main_addr=self.main_addr,
        )
        if not restarts_given and "max-restarts" not in request.options:
            spec = replace(spec, max_restarts=context.settings.max_restarts)
        limit = self._time_limit(parse_seconds(timeout_s, "run(timeout_s)"))
        retried = parse_retry_on(retry_on, "run(retry_on=...)")
        retried = context.settings.retry_on if retried is None else retried
        facts = {"torch": torch_version(), "retry_on": sorted(retried)}
        context.emit(Event("chosen", self.node_index, f"processes per node: {nproc.value} ({nproc.why})"))
        grace = context.settings.grace_s
        return Supervisor(spec, context.seat, self.main_addr, context.machine, grace, limit, facts, write_output).run()

    def _choose_nproc(self, call_settings: Sequence[tuple[str, int | str | None]]) -> Nproc:
        context = self._context
        attribute = ("@torchrun(nproc_per_node)", context.settings.nproc_per_node)
        return choose_nproc([*call_settings, attribute], context.requested, context.machine)

    def _time_limit(self, timeout_s: float | None) -> float | None:
        """Return the smaller of the call's limit and what is left of the step's ``@timeout``."""
        limits = [] if timeout_s is None else [timeout_s]
        if self._context.deadline is not None:
            limits.append(max(0.1, self._context.deadline - time.monotonic()))
        return min(limits) if limits else None

    def _warn_of_ignored(self, given: Mapping[str, Any]) -> None:
        with _warned_lock:
            names = [name for name, value in given.items() if value and name not in _warned]
            _warned.update(names)
        if names:
            text = f"warning: run({', '.join(names)}) has no effect; store outputs as artifacts or with @checkpoint instead"
            self._context.emit(Event("note", self.node_index, text))


class TorchrunSingleNodeMultiGPU:
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node.
    """

    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: str | os.PathLike[str] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Any,
    ) -> TorchrunResult:
        """Run a script under torchrun on this machine and wait for its end.

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
        error: BaseException | None = None
        try:
            executor = TorchrunExecutor(Context(seat, LOOPBACK, this_machine(), settings, flow_dir=flow_folder()))
            return executor.run(
                entrypoint, entrypoint_args, nproc_per_node=nproc_per_node, torchrun_args=torchrun_args, **options
            )
        except BaseException as caught:
            error = caught
            raise
        finally:
            seat.leave(error)


def torch_version() -> str:
    """Return the version of the installed PyTorch without importing it.

    Raises
    ------
    TorchNotFoundError
        If it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise TorchNotFoundError(
            f"PyTorch is not installed for {sys.executable}, which runs this step. Install it there (pip install torch), "
            "or give the step an environment that has it: @pypi(packages={'torch': '...'}), @conda, or an image."
        )
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # an installation without metadata, as some images have
        return "unknown"


def flow_folder() -> str | None:
    """Return the folder of the flow file, which is the program that Metaflow runs."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else None
