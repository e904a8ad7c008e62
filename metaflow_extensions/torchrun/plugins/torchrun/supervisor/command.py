"""Builds the argv, the environment and the folder of a launch's agent, and of the commands before."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping, Sequence

from ..gang.messages import Go
from ..machine.accelerators import Machine
from ..machine.network import interface_of
from ..machine.stacks import hook_environment
from .call import Call

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "worker")
AGENT = os.path.join(SCRIPTS, "agent.py")  # runs torchrun, and gives its workers their pipes
# Makes an agent wait, and act on its workers no more. See `machine.stacks` for its neighbour.
HALT_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 5  # macOS has none, and makes packages with this module
# This folder comes first on the path of agent and workers; its `sitecustomize` records how a worker ends.
WORKER_HOOKS = os.path.join(SCRIPTS, "worker_hooks")
# This one comes last on their path, so that all that they start can import what it holds: `metaflow_torchrun`.
IMPORTABLE = os.path.join(SCRIPTS, "importable")
# "1/3": restart 1 of at most 3. The agent takes it, and sets the variables of torchelastic in each worker: it runs one
# generation only, so torchrun (2.13) would set TORCHELASTIC_RESTART_COUNT and _MAX_RESTARTS to 0.
_RESTARTS = "TORCHRUN_RESTARTS"
_HIDES = "TORCHRUN_HIDES"  # set where the lines of some ranks are not shown

STATIC_BACKEND = "static"

# Our torchrun would take the settings of an outer one for its defaults (argparse actions of torch's `env` in
# run.py, 2.13), and a script may read them before torchrun sets its own.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_")
_FOREIGN_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *(_RESTARTS, _HIDES, "TORCHRUN_METRICS", "TORCHRUN_CALLS", "TORCHRUN_AGENT_PID"),
    }
)


def agent_command(call: Call, go: Go, log_dir: str, pipes: str) -> list[str]:
    """Return the argv of this node's agent: torchrun, with a static rendezvous.

    `log_dir` is where torchrun makes a folder for each worker, `pipes` where the workers find those for their output.
    """
    given = call.options
    options = {
        "nproc-per-node": str(call.nproc),
        "rdzv-endpoint": f"{bracketed(call.main_addr)}:{go.port}",
        "log-dir": log_dir,
        **given,
        # The workers see it as TORCHELASTIC_RUN_ID.
        "rdzv-id": given.get("rdzv-id") or f"launch{go.launch}-{go.generation}-{go.gang}",
        "nnodes": str(call.group_size),
        "node-rank": str(call.group_rank),
        "rdzv-backend": STATIC_BACKEND,
        "max-restarts": "0",  # the gang restarts its generations as a whole; torchrun would restart one node alone
    }
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    words += ["--module"] if call.module else []
    # "--" keeps torchrun's argparse from taking a script's "--d" for an ambiguous option of its own. torchrun fills
    # ${local_rank} into what follows by string.Template (torch 2.13, elastic/utils/api.py); a doubled dollar comes out as
    # the one that the user wrote.
    program = [word.replace("$", "$$") for word in (call.entrypoint, *call.args)]
    return [call.python, AGENT, pipes, str(HALT_SIGNAL), *words, "--", *program]


def bracketed(addr: str) -> str:
    """Return an address as it stands before a port: IPv6 in brackets."""
    return f"[{addr}]" if ":" in addr and not addr.startswith("[") else addr


def shown_command(command: Sequence[str]) -> list[str]:
    """Return the argv of an agent as a user would type it."""
    return [command[0], "-m", "torch.distributed.run", *command[4:]] if command[1:2] == [AGENT] else list(command)


def with_hooks(env: Mapping[str, str], module_folder: str | None) -> dict[str, str]:
    """Return an environment with what our hooks in the agent and its workers need."""
    env = dict(env)
    hooks, importable = (WORKER_HOOKS, IMPORTABLE) if os.pathsep not in SCRIPTS else (None, None)
    # An empty entry would mean the working directory, so there must be none of ours.
    if path := [*filter(None, (hooks, module_folder, env.get("PYTHONPATH"), importable))]:
        env["PYTHONPATH"] = os.pathsep.join(path)
    return env


def agent_environment(call: Call, go: Go, own_address: str | None) -> dict[str, str]:
    """Return the environment of this node's agent: that of commands, with our hooks and the gang's restarts."""
    env = with_hooks(environment_of_commands(call, own_address), call.module_folder)
    # Of the nodes' limits the control node's counts, which is in `go`.
    restarts = {_RESTARTS: f"{go.generation}/{go.max_restarts}"} if go.max_restarts > 0 else {}
    hides = {} if call.shows_failures else {_HIDES: "1"}
    return {**env, **restarts, **hides, **hook_environment()}


def command_environment(
    machine: Machine, nproc: int, given: Mapping[str, str], inherited: Mapping[str, str], interface: str | None = None
) -> dict[str, str]:
    """Return the environment of a command: that of a worker, but without our hooks and without a rank."""
    env = {name: value for name, value in inherited.items() if not name.startswith(_FOREIGN_PREFIXES)}
    env = {name: value for name, value in env.items() if name not in _FOREIGN_NAMES}
    env.setdefault("OMP_NUM_THREADS", str(max(1, int(machine.cpus // (nproc * machine.nodes_here)))))
    env.setdefault("PYTHONUNBUFFERED", "1")
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    if machine.nodes_here > 1 and machine.accelerators:  # nodes of one machine use no device twice
        env["CUDA_VISIBLE_DEVICES"] = ",".join(machine.own_accelerators)
    return {**env, **given}  # the user's values win, except that our hooks stay first on the path


def make_folder(call: Call, what: str) -> str:
    """Make a folder for the files of a generation, or of the commands before."""
    name = f"torchrun-node{call.node_index}-{what}-"
    # Made absolute: without a temporary folder mkdtemp uses the working directory, and the agent may have another one.
    return os.path.abspath(tempfile.mkdtemp(prefix=name))


def environment_of_commands(call: Call, own_address: str | None) -> dict[str, str]:
    """Return the environment of before_run, which is what workers have, too."""
    # A gang of one has no connection; it is reached by its loopback address.
    interface = interface_of(own_address or call.main_addr)
    return command_environment(call.machine, call.nproc, call.env, call.environ, interface)
