"""Prepares one generation: the command, environment, folder and pipes of its agent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from ..events import label
from ..gang.messages import Go
from ..launch.command import HALT_SIGNAL, agent_command, command_environment, restart_variables, with_hooks
from ..logs.pipes import AGENT, LogReader, Write, pipe_path
from ..machine.accelerators import Machine, omp_threads
from ..machine.network import interface_of
from ..machine.stacks import hook_environment
from .agent import AgentProcess, Options
from .agent_events import AgentNews
from .generation import Generation
from .progress_observer import FOLDER, METRICS, metrics_file
from .request import Request
from .seat import Seat
from .warm import WarmNode

# For the small files of a launch: records of exceptions, metrics, the pipes themselves.
_ROOM_BYTES = 1024 * 1024


def prepare(
    request: Request,
    go: Go,
    seat: Seat,
    write: Write,
    warm: WarmNode | None = None,
    new_agent: Callable[..., AgentProcess] = AgentProcess,
) -> Generation:
    """Make all that a generation needs, or raise if it can't start. Its events go to the inbox of `seat`."""
    for emptied in request.emptied:  # of what workers of a former generation have left
        shutil.rmtree(emptied, ignore_errors=True)
        os.makedirs(emptied)
    with ExitStack() as failed:
        folder = make_folder(request, f"launch{go.launch}-{go.generation}")
        failed.callback(shutil.rmtree, folder, ignore_errors=True)
        pipes = os.path.join(folder, "pipes")
        os.mkdir(pipes)
        command = agent_command(request.spec, go, request.main_addr, folder, pipes)
        own = {**hook_environment(), FOLDER: os.path.dirname(metrics_file(folder, 0))}
        env = _environment(request, go, seat.link.own_address, own)
        logs = _reader(request, pipes, write)
        failed.callback(logs.finish)
        inbox = seat.inbox  # this launch's; a later launch has another
        begin = None
        if warm is not None and request.warm != "off":
            begin = partial(warm.start, command, request.spec.nproc if request.has_warm_workers else 0)
        agent = new_agent(
            command,
            env,
            _options(request, pipes),
            lambda event: inbox.put_nowait(AgentNews(go.generation, event)),
            begin,
        )
        generation = Generation(request, seat, go, folder, command, agent, logs)
        failed.pop_all()
    return generation


def _reader(request: Request, pipes: str, write: Write) -> LogReader:
    return LogReader(
        pipes,
        {rank: (request.label(rank), request.hides(rank)) for rank in range(request.spec.nproc)},
        label(request.spec.node_index, request.spec.num_nodes),
        write,
        holds_report=True,
    )


def make_folder(request: Request, what: str) -> str:
    """Make a folder for the files of a generation, or of the commands before."""
    name = f"torchrun-node{request.spec.node_index}-{what}-"
    # Made absolute: without a temporary folder mkdtemp uses the working directory, and the agent may have another one.
    return os.path.abspath(tempfile.mkdtemp(prefix=name, dir=_with_room()))


def _with_room() -> str:
    """Return the folder for temporary files, or where the system has another one if that disk is full."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/dev/shm"):  # noqa: S108 - mkdtemp makes a folder that nobody else may enter
        with suppress(OSError):
            status = os.statvfs(folder)
            if status.f_bavail * status.f_frsize >= _ROOM_BYTES and os.access(folder, os.W_OK):
                return folder
    return usual


def _environment(request: Request, go: Go, own_address: str | None, own: Mapping[str, str]) -> dict[str, str]:
    # Values that the task itself has inherited under our names belong to another worker.
    inherited = {name: value for name, value in request.environ.items() if name not in {*own, METRICS}}
    base = environment_of_commands(request, own_address, inherited)
    return {**own, **with_hooks(base, request.spec.module_folder), **restart_variables(go)}


def environment_of_commands(request: Request, own_address: str | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of before_run, which is what workers have, too; `inherited` is the task's."""
    spec, machine, given = request.spec, request.machine, dict(request.spec.env)
    # A gang of one has no connection; it is reached by its loopback address.
    interface = interface_of(own_address or request.main_addr)
    threads = omp_threads(machine, spec.nproc)
    return {**command_environment(given, inherited, threads, interface), **share_of_machine(machine, given)}


def share_of_machine(machine: Machine, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the nodes of one machine from using the same devices."""
    if machine.nodes_here == 1 or not machine.accelerators or "CUDA_VISIBLE_DEVICES" in given:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.own_accelerators)}


def _options(request: Request, pipes: str) -> Options:
    return Options(
        news=pipe_path(pipes, AGENT, "workers"),
        stdout=pipe_path(pipes, AGENT, "stdout"),
        stderr=pipe_path(pipes, AGENT, "stderr"),
        grace_s=request.grace_s,
        halt_signal=HALT_SIGNAL,
        cwd=request.cwd,
    )
