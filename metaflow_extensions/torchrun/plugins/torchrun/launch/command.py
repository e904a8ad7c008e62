"""The argv and the environment that a launch becomes. Pure: argv is a list, quoted only where it is printed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .spec import ELASTIC_BACKEND, STATIC_BACKEND, LaunchSpec, bracketed

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")
# This folder comes first on the path of agent and workers; its `sitecustomize` records how a worker ends.
WORKER_HOOKS = os.path.join(SCRIPTS, "worker_hooks")
# The agent is the first Python of a launch and puts its pid there, so that its children know that they are workers.
_AGENT_VARIABLE = "TORCHRUN_AGENT_PID"

# Our torchrun would take the settings of an outer one for its defaults (argparse actions of torch's `env` in
# run.py, 2.13), and a script may read them before torchrun sets its own.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_")
_FOREIGN_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name the agents of one generation meet."""

    addr: str  # of the control node, as this node reaches it
    port: int  # of the store that rank 0's agent opens there
    run_id: str  # the workers see it as TORCHELASTIC_RUN_ID
    restarts: int = 0  # how often the gang was restarted before


def agent_command(spec: LaunchSpec, rendezvous: Rendezvous, log_dir: str) -> list[str]:
    """Return the argv of this node's agent: torchrun, with a static rendezvous unless the user wants its elasticity."""
    given = dict(spec.options)
    options: list[tuple[str, str | None]] = [
        *_gang_options(spec, given),
        ("nproc-per-node", str(spec.nproc)),
        ("rdzv-endpoint", f"{bracketed(rendezvous.addr)}:{rendezvous.port}"),
        ("rdzv-id", given.pop("rdzv-id", None) or rendezvous.run_id),
        # Files instead of pipes: they are complete whatever dies, and no rank waits for a reader.
        ("redirects", "3"),
        ("log-dir", log_dir),
    ]
    command = [spec.python, "-m", "torch.distributed.run"]
    for name, value in [*options, *given.items()]:
        command.append(f"--{name}" if value is None else f"--{name}={value}")
    if spec.max_restarts and spec.min_nodes is None and "run-path" not in given:
        return [*command, *_told_of_restarts(spec, rendezvous.restarts)]
    if spec.module:
        command.append("--module")
    # torchrun fills ${local_rank} into the arguments by string.Template (torch 2.13,
    # elastic/utils/api.py); a doubled dollar comes out as the one that the user wrote.
    # With --no-python the entrypoint itself is not among them.
    entrypoint = spec.entrypoint if "no-python" in given else spec.entrypoint.replace("$", "$$")
    # "--" keeps torchrun's argparse from taking a script's "--d" for an ambiguous option of its own.
    return [*command, "--", entrypoint, *_escaped(spec.args)]


def _gang_options(spec: LaunchSpec, given: dict[str, str | None]) -> list[tuple[str, str | None]]:
    """Return the options that say how the agents find each other; takes ``rdzv-conf`` out of `given` where it does."""
    if spec.min_nodes is not None:
        return [
            ("nnodes", f"{spec.min_nodes}:{spec.num_nodes}"),
            ("rdzv-backend", ELASTIC_BACKEND),
            ("rdzv-conf", _elastic_conf(spec, given.pop("rdzv-conf", None))),
            ("max-restarts", str(spec.max_restarts)),
        ]
    return [
        ("nnodes", str(spec.num_nodes)),
        ("node-rank", str(spec.node_index)),
        ("rdzv-backend", STATIC_BACKEND),
        # The gang restarts its generations as a whole; torchrun would restart one node alone.
        ("max-restarts", "0"),
    ]


def _elastic_conf(spec: LaunchSpec, given: str | None) -> str:
    """Return ``rdzv-conf``: what the user gave, and who hosts the store and how long agents wait.

    By default c10d (``c10d_rendezvous_backend.py`` and ``dynamic_rendezvous.py`` in
    ``torch/distributed/elastic/rendezvous``, torch 2.13) guesses the host from its names, waits 60 s for a
    connection and 600 s for the other agents.
    """
    conf = dict.fromkeys(("read_timeout", "join_timeout"), str(spec.elastic_timeout_s))
    for entry in (given or "").split(","):
        key, equals, value = entry.strip().partition("=")
        if equals:
            conf[key] = value
    conf["is_host"] = "true" if spec.node_index == 0 else "false"
    return ",".join(f"{key}={value}" for key, value in conf.items())


def _told_of_restarts(spec: LaunchSpec, restarts: int) -> list[str]:
    """Return the words that make workers see the gang's restarts in the variables that torchrun sets.

    Each agent runs one generation only, so torchrun (2.13) sets both to 0; ``env`` sets them anew and
    becomes the worker.
    """
    bare = "no-python" in dict(spec.options)
    count, limit = f"TORCHELASTIC_RESTART_COUNT={restarts}", f"TORCHELASTIC_MAX_RESTARTS={spec.max_restarts}"
    # As torchrun starts a script (config_from_args in torch/distributed/run.py, 2.13).
    python = [] if bare else [spec.python, "-u", *(["-m"] if spec.module else [])]
    flag = [] if bare else ["--no-python"]
    return [*flag, "--", "env", count, limit, *_escaped([*python, spec.entrypoint, *spec.args])]


def _escaped(words: Sequence[str]) -> list[str]:
    return [word.replace("$", "$$") for word in words]


def agent_environment(
    spec: LaunchSpec, inherited: Mapping[str, str], omp_threads: int, interface: str | None
) -> dict[str, str]:
    """Return the whole environment of this node's agent and workers; `inherited` is the task's."""
    env = {name: value for name, value in inherited.items() if not _is_foreign(name)}
    env.setdefault("OMP_NUM_THREADS", str(omp_threads))
    env.setdefault("PYTHONUNBUFFERED", "1")
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    env.update(spec.env)  # it wins over everything, save that our hooks stay first on the path
    if os.pathsep not in WORKER_HOOKS:
        env[_AGENT_VARIABLE] = ""
        # An empty entry would mean the working directory, so there must be none of ours.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [WORKER_HOOKS, env.get("PYTHONPATH")]))
    return env


def shown(command: Sequence[str]) -> str:
    """Return `command` quoted so that it can be pasted into a shell."""
    return shlex.join(command)


def _is_foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)
