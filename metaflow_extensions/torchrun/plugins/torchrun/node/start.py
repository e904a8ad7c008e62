"""How a launch becomes an agent with workers: command, environment, folder and log files of one generation."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ..errors import TorchrunConfigError
from ..gang.cause import SHORT_PEER_ERRORS
from ..gang.member import Member
from ..gang.protocol import Go
from ..launch.command import TORCHRUN, agent_command, agent_environment, program_environment, restart_variables
from ..machine.accelerators import Machine, Nproc, choose_nproc, omp_threads
from ..machine.network import interface_of
from ..settings import StepSettings
from .agent import AgentProcess
from .agent_events import AgentEvent
from .commands import COMMANDS_FILE, CommandGeneration, runner_command
from .generation import Generation, stacks_folder
from .guardian import Options
from .logs import LogFollower
from .plan import Plan
from .stacks import hook_environment
from .usage_meter import UsageMeter
from .warm_start import WarmNode, WarmStart


@dataclass(frozen=True)
class AgentNews:
    """What has happened to the agent of one generation, in the launch's inbox."""

    generation: int
    event: AgentEvent


def prepare(plan: Plan, go: Go, member: Member, new_agent: Callable[..., AgentProcess]) -> Generation:
    """Make all that a generation needs, or raise what keeps it from starting; the inbox of `member` gets `AgentNews`."""
    if plan.call is not None:
        plan.call.begin()
    folder = _make_folder(plan, go)
    try:
        return _prepare_in(folder, plan, go, member, new_agent)
    except BaseException:
        _remove(folder)
        raise


def _prepare_in(folder: str, plan: Plan, go: Go, member: Member, new_agent: Callable[..., AgentProcess]) -> Generation:
    logs = {stream: os.path.join(folder, f"agent.{stream}") for stream in ("stdout", "stderr")}
    for path in logs.values():
        open(path, "wb").close()
    command = _command(plan, go, folder)
    warm = _warm_start(plan, go, folder)
    env = _environment(plan, folder, member.own_address)
    own_label = f"[torchrun node {plan.spec.node_index}] "
    # An elastic agent goes on after it has reported a failure.
    hold_report = not (plan.is_elastic or plan.runs_commands)
    follower = LogFollower(folder, logs, plan.label, own_label, plan.write, hold_report)
    inbox = member.inbox  # this launch's; a later launch has another
    options = _options(plan, folder, logs)
    agent = new_agent(command, env, options, lambda event: inbox.put(AgentNews(go.generation, event)), warm)
    measure = partial(UsageMeter, plan, folder, follower)
    kind = CommandGeneration if plan.runs_commands else Generation
    return kind(plan, member.host, go, folder, command, agent, follower, measure)


def _command(plan: Plan, go: Go, folder: str) -> list[str]:
    if plan.runs_commands:
        return runner_command(plan, folder)
    return agent_command(plan.spec, go, plan.main_addr, folder)


def _make_folder(plan: Plan, go: Go) -> str:
    name = f"torchrun-node{plan.spec.node_index}-launch{go.launch}-{go.generation}-"
    if plan.spec.log_dir is not None:
        os.makedirs(plan.spec.log_dir, exist_ok=True)
    try:
        # Relative where the system has no temporary folder but the working one, which can be another for the agent.
        return os.path.abspath(tempfile.mkdtemp(prefix=name, dir=plan.spec.log_dir))
    except FileNotFoundError:
        where = plan.spec.log_dir or tempfile.gettempdir()
        raise OSError(f"the folder {where} is gone; make it again, or have TMPDIR name another") from None


def _remove(folder: str) -> None:
    """Remove a folder that no agent has had, also where too many files are open: then it can't be listed."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("agent.stdout", "agent.stderr", COMMANDS_FILE):
        with suppress(OSError):
            os.remove(os.path.join(folder, name))
    for each in (stacks_folder(folder), folder):
        with suppress(OSError):
            os.rmdir(each)


def _environment(plan: Plan, folder: str, own_address: str | None) -> dict[str, str]:
    spec, machine = plan.spec, plan.machine
    # A gang of one has no connection; it is reached by its loopback address.
    interface = interface_of(own_address or plan.main_addr)
    given, threads = dict(spec.env), omp_threads(machine, spec.nproc)
    share = _share_of_machine(machine, given)
    if plan.runs_commands:
        return {**program_environment(given, os.environ, threads, interface), **share}
    env = {**agent_environment(given, os.environ, threads, interface, folder), **share}
    if plan.shares_machine:
        env.update(SHORT_PEER_ERRORS)
    if plan.policy.hang_timeout_s is not None:
        os.makedirs(stacks_folder(folder))
        env.update(hook_environment(stacks_folder(folder), env, str(plan.facts.get("torch"))))
    return env


def _share_of_machine(machine: Machine, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the nodes of one machine from using the same devices."""
    if machine.nodes_here == 1 or not machine.accelerators or "CUDA_VISIBLE_DEVICES" in given:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.own_accelerators)}


def begin_warm(settings: StepSettings, machine: Machine, requested: Nproc | None) -> WarmNode | None:
    """Begin to import what the launches of a step will need, in the background; None where it is not wanted.

    What it can know beforehand of their environment, it has. `requested` is what the resources of a task amount to.
    """
    if settings.warm == "off" or sys.platform != "linux":
        return None
    nproc = 1
    with suppress(TorchrunConfigError):  # `run` raises it
        nproc = choose_nproc(settings.nproc_per_node, "nproc_per_node", requested, machine).value
    env = agent_environment({}, os.environ, omp_threads(machine, nproc), None, "")
    warm = WarmNode([TORCHRUN, *settings.preload], {**env, **_share_of_machine(machine, {})})
    with suppress(Exception):  # a launch will say so
        warm.begin()
    return warm


def _warm_start(plan: Plan, go: Go, folder: str) -> WarmStart | None:
    if plan.warm_node is None or plan.warm == "off":
        return None
    # Another program than Python can't be forked from it.
    forks_workers = plan.warm == "workers" and "no-python" not in dict(plan.spec.options)
    command = agent_command(plan.spec, go, plan.main_addr, folder, forks_workers)
    return WarmStart(plan.warm_node, command, forks_workers, restart_variables(plan.spec, go) if forks_workers else {})


def _options(plan: Plan, folder: str, logs: dict[str, str]) -> Options:
    scratch = [folder] if plan.spec.log_dir is None else []
    scratch += [plan.call.folder] if plan.call is not None else []
    return Options(
        **logs,
        grace_s=plan.grace_s,
        silence_s=plan.silence_s,
        workers=0 if plan.runs_commands else plan.spec.nproc,
        restarts=plan.is_elastic,
        cwd=plan.spec.cwd,
        scratch=scratch,
    )
