"""Prepares one generation: the command, environment, folder and pipes of its agent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from ..events import label
from ..gang.messages import Go
from ..machine.network import interface_of
from ..machine.stacks import hook_environment
from .agent import AgentProcess, Options
from .agent_events import AgentNews
from .call import Call
from .command import HALT_SIGNAL, agent_command, command_environment, restart_variables, with_hooks
from .generation import Generation
from .pipes import AGENT, LogReader, Write, pipe_path
from .progress_observer import FOLDER, metrics_folder
from .seat import Seat
from .warm import WarmNode

# For the small files of a launch: records of exceptions, metrics, the pipes themselves.
_ROOM_BYTES = 1024 * 1024


def prepare(
    call: Call,
    go: Go,
    seat: Seat,
    write: Write,
    warm: WarmNode | None = None,
    new_agent: Callable[..., AgentProcess] = AgentProcess,
) -> Generation:
    """Make all that a generation needs, or raise if it can't start. Its events go to the inbox of `seat`."""
    for emptied in call.emptied:  # of what workers of a former generation have left
        shutil.rmtree(emptied, ignore_errors=True)
        os.makedirs(emptied)
    with ExitStack() as failed:
        folder = make_folder(call, f"launch{go.launch}-{go.generation}")
        failed.callback(shutil.rmtree, folder, ignore_errors=True)
        pipes = os.path.join(folder, "pipes")
        os.mkdir(pipes)
        command = agent_command(call, go, folder, pipes)
        env = with_hooks(environment_of_commands(call, seat.link.own_address), call.module_folder)
        env |= {**restart_variables(go), **hook_environment(), FOLDER: metrics_folder(folder)}
        logs = _reader(call, pipes, write)
        failed.callback(logs.finish)
        inbox = seat.inbox  # this launch's; a later launch has another
        begin = None
        if warm is not None and call.warm != "off":
            begin = partial(warm.start, command, call.nproc if call.has_warm_workers else 0)
        agent = new_agent(
            command,
            env,
            _options(call, pipes),
            lambda event: inbox.put_nowait(AgentNews(go.generation, event)),
            begin,
        )
        generation = Generation(call, seat, go, folder, command, agent, logs)
        failed.pop_all()
    return generation


def _reader(call: Call, pipes: str, write: Write) -> LogReader:
    return LogReader(
        pipes,
        {rank: (f"[rank {call.global_rank(rank)}] ", call.hides(rank)) for rank in range(call.nproc)},
        label(call.node_index, call.num_nodes),
        write,
        holds_report=True,
    )


def make_folder(call: Call, what: str) -> str:
    """Make a folder for the files of a generation, or of the commands before."""
    name = f"torchrun-node{call.node_index}-{what}-"
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


def environment_of_commands(call: Call, own_address: str | None) -> dict[str, str]:
    """Return the environment of before_run, which is what workers have, too."""
    # A gang of one has no connection; it is reached by its loopback address.
    interface = interface_of(own_address or call.main_addr)
    return command_environment(call.machine, call.nproc, call.env, call.environ, interface)


def _options(call: Call, pipes: str) -> Options:
    return Options(
        news=pipe_path(pipes, AGENT, "workers"),
        stdout=pipe_path(pipes, AGENT, "stdout"),
        stderr=pipe_path(pipes, AGENT, "stderr"),
        grace_s=call.grace_s,
        halt_signal=HALT_SIGNAL,
        cwd=call.cwd,
    )
