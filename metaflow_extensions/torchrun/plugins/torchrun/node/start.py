"""Prepares one generation: the command, environment, folder and pipes of its agent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..events import Event, label
from ..gang.messages import Go
from ..launch.command import HALT_SIGNAL, agent_command, command_environment, restart_variables, with_hooks
from ..logs.pipes import AGENT, LogReader, pipe_path
from ..machine.accelerators import Machine, omp_threads
from ..machine.network import interface_of
from .agent import AgentProcess, Options, Warm
from .agent_events import AgentNews
from .generation import Generation
from .plan import Plan
from .seat import Seat
from .watchers import HOOKS, Variables, variables_of

# For the small files of a launch: records of exceptions, metrics, the pipes themselves.
_ROOM_BYTES = 1024 * 1024


def prepare(plan: Plan, go: Go, seat: Seat, new_agent: Callable[..., AgentProcess]) -> Generation:
    """Make all that a generation needs, or raise if it can't start. Its events go to the inbox of `seat`."""
    for emptied in plan.emptied:  # of what workers of a former generation have left
        shutil.rmtree(emptied, ignore_errors=True)
        os.makedirs(emptied)
    folder = make_folder(plan, f"launch{go.launch}-{go.generation}")
    try:
        return _prepare_in(folder, plan, go, seat, new_agent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _prepare_in(folder: str, plan: Plan, go: Go, seat: Seat, new_agent: Callable[..., AgentProcess]) -> Generation:
    def say(text: str, is_detail: bool = True) -> None:
        seat.emit(Event("note", seat.node, text, is_detail))

    variables = variables_of(plan.watches, plan, folder, say)
    pipes = os.path.join(folder, "pipes")
    os.mkdir(pipes)
    command = agent_command(plan.spec, go, plan.main_addr, folder, pipes, of_rank=variables.of_rank)
    warm = _warm(plan, command)
    env = _environment(plan, go, seat.link.own_address, variables)
    logs = _reader(plan, pipes)
    inbox = seat.inbox  # this launch's; a later launch has another
    options = _options(plan, pipes)
    try:
        agent = new_agent(command, env, options, lambda event: inbox.put_nowait(AgentNews(go.generation, event)), warm)
        return Generation(plan, seat.host, go, folder, command, agent, logs, say)
    except BaseException:
        logs.finish()
        raise


def _reader(plan: Plan, pipes: str) -> LogReader:
    return LogReader(
        pipes,
        {rank: (plan.label(rank), plan.hides(rank)) for rank in range(plan.spec.nproc)},
        label(plan.spec.node_index, plan.spec.num_nodes),
        plan.write,
        holds_report=True,
    )


def make_folder(plan: Plan, what: str) -> str:
    """Make a folder for the files of a generation, or of the commands before."""
    name = f"torchrun-node{plan.spec.node_index}-{what}-"
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


def _environment(plan: Plan, go: Go, own_address: str | None, variables: Variables) -> dict[str, str]:
    inherited = {name: value for name, value in plan.environ.items() if name not in variables.names}
    base = environment_of_commands(plan, own_address, inherited)
    env = {**variables.of_node, **with_hooks(base, plan.spec.module_folder)}
    env.update(restart_variables(go))
    if variables.hooks:
        env[HOOKS] = os.pathsep.join(variables.hooks)
    return env


def environment_of_commands(plan: Plan, own_address: str | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of before_run, which is what workers have, too; `inherited` is the task's."""
    spec, machine, given = plan.spec, plan.machine, dict(plan.spec.env)
    # A gang of one has no connection; it is reached by its loopback address.
    interface = interface_of(own_address or plan.main_addr)
    threads = omp_threads(machine, spec.nproc)
    return {**command_environment(given, inherited, threads, interface), **share_of_machine(machine, given)}


def share_of_machine(machine: Machine, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the nodes of one machine from using the same devices."""
    if machine.nodes_here == 1 or not machine.accelerators or "CUDA_VISIBLE_DEVICES" in given:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.own_accelerators)}


def _warm(plan: Plan, command: list[str]) -> Warm | None:
    if plan.warm_node is None or plan.warm == "off":
        return None
    return partial(plan.warm_node.start, command, plan.spec.nproc if plan.has_warm_workers else 0)


def of_task(plan: Plan) -> dict[str, Any]:
    """Return what a program has from the task, as fields of `Options`."""
    task = plan.task
    return {"cwd": plan.cwd} | ({} if task is None else {"inherited": task.inherited, "umask": task.umask})


def _options(plan: Plan, pipes: str) -> Options:
    return Options(
        news=pipe_path(pipes, AGENT, "workers"),
        stdout=pipe_path(pipes, AGENT, "stdout"),
        stderr=pipe_path(pipes, AGENT, "stderr"),
        grace_s=plan.grace_s,
        halt_signal=HALT_SIGNAL,
        **of_task(plan),
    )
