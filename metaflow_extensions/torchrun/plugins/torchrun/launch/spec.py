"""`LaunchSpec`: one call of `run`, checked and complete. Pure: arguments in, values out."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EntrypointError, TorchrunConfigError
from ..parsing import parse_argv
from ..settings import StepSettings, argument, choose
from .arguments import OPTIONS, entrypoint_arguments, torchrun_options
from .commands import beside_flow, find_program, source_of

STATIC_BACKEND = "static"
# Options that the gang decides or does itself; torchrun gets its own value of them, or none.
_DECIDED = frozenset({"nproc-per-node", "master-port", "max-restarts", "redirects", "tee"})


# Options of torchrun (2.13) that would break what a launch promises, and why.
_REFUSED = {
    "help": "torchrun would print its help and start no worker. See docs/reference.md for what it can do here.",
    "run-path": "torchrun would fork its workers from a process with threads; without it the script runs the same.",
    "virtual-local-rank": "all ranks of a node would have LOCAL_RANK 0, by which their output and their ends are told "
    "apart; set CUDA_VISIBLE_DEVICES in the script instead.",
}


@dataclass(frozen=True)
class FunctionSpec:
    """The function that workers call instead of a script."""

    name: str
    script: str  # that calls it in a worker
    folder: str  # where the script finds the call, and writes its outcome
    source: str | None  # the file with its code


@dataclass(frozen=True)
class LaunchSpec:
    """One `run` call on one node, validated."""

    entrypoint: str  # absolute path of the script, or the name of the module or (with no-python) the executable
    args: tuple[str, ...]  # what the script sees as sys.argv[1:]
    module: bool  # run as python -m
    nproc: int  # processes per node
    num_nodes: int
    node_index: int
    python: str
    options: tuple[tuple[str, str | None], ...] = ()  # torchrun's further ones, with hyphens; None marks a flag
    shown_local_ranks: frozenset[int] | None = None  # whose output is shown; None shows all
    master_port: int | None = None  # None: the control node chooses
    max_restarts: int = 0
    env: tuple[tuple[str, str], ...] = ()  # what the user sets for this launch
    cwd: str | None = None  # absolute path; None is the task's own
    log_dir: str | None = None  # absolute path of where torchrun's log files are kept; None keeps none
    function: FunctionSpec | None = None  # what the entrypoint calls, where that is ours
    source: str | None = None  # the file that must be the same on all nodes; None means the entrypoint
    bools: tuple[tuple[str, bool], ...] = ()  # of `args`, those that were given as True or False, by their names
    command: tuple[str, ...] = ()  # the words of a command as entrypoint, as they were given
    module_folder: str | None = None  # where the workers find the module, unless Python finds it without that

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return self.nproc * self.num_nodes

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a worker of this node."""
        return self.node_index * self.nproc + local_rank

    @property
    def ranks(self) -> range:
        """The global ranks of this node, in the order of the local ones."""
        return range(self.global_rank(0), self.global_rank(self.nproc))

    def digest(self) -> str:
        """Return a fingerprint of what must be the same on every node."""
        options = [option for option in self.options if option[0] != "rdzv-id"]
        name = os.path.basename(self.entrypoint) if self.function is None else self.function.name
        what = [name, self.module, options]
        what += [[os.path.basename(word) for word in self.command]] if self.command else []
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Node:
    """What a launch must know of its node."""

    num_nodes: int
    node_index: int
    main_addr: str
    flow_dir: str | None = None  # the folder of the flow file, if there is one


def build_spec(
    given: Mapping[str, Any],
    nproc: int,
    settings: StepSettings,
    node: Node,
    function: FunctionSpec | None = None,
    may_come: bool = False,
) -> LaunchSpec:
    """Check the arguments of `run`, by name, and return them as a launch.

    `function` is what the workers call if the entrypoint is one. `may_come`: what runs before may still make the entrypoint.
    """
    options = torchrun_options(given.get("torchrun_args"))
    env: dict[str, str] = argument("env", given) or {}
    _refuse_what_has_no_use(options, env)
    _refuse_what_the_gang_decides(options, node)
    module = bool(given.get("module")) | (options.pop("module", "absent") is None)
    cwd, log_dir = argument("cwd", given), options.pop("log-dir", None)
    if function is not None:
        program: dict[str, Any] = {"entrypoint": function.script, "args": (function.folder,)}
        program |= {"source": function.source, "function": function}
    elif isinstance(given.get("entrypoint"), list | tuple):
        program = _command(given, options, module, cwd, env, node.flow_dir, may_come)
    else:
        is_path = not module and "no-python" not in options
        folders = (cwd or os.getcwd(), node.flow_dir)
        found = _find_entrypoint(given.get("entrypoint"), is_path, folders, may_come)
        program = {"entrypoint": found, **_arguments(given)}
        program["module_folder"] = _folder_of_module(found, *folders) if module else None
    return LaunchSpec(
        **program,
        module=module,
        nproc=nproc,
        num_nodes=node.num_nodes,
        node_index=node.node_index,
        python=sys.executable,
        master_port=choose("master_port", given, options, settings).value,
        max_restarts=choose("max_restarts", given, options, settings).value,
        shown_local_ranks=_local_ranks(options.pop("local-ranks-filter", None), nproc),
        # As torchrun, which runs in `cwd`, would take this name; we run elsewhere and read there, too.
        log_dir=None if log_dir is None else os.path.abspath(os.path.join(cwd or "", log_dir)),
        env=tuple(env.items()),
        cwd=cwd,
        options=tuple((name, value) for name, value in options.items() if name not in _DECIDED),
    )


# What workers run, as fields of `LaunchSpec`. ------------------------------------------------------


def _command(
    given: Mapping[str, Any],
    options: dict[str, str | None],
    module: bool,
    cwd: str | None,
    env: Mapping[str, str],
    flow_dir: str | None,
    may_come: bool,
) -> dict[str, Any]:
    """Return a command; its `options` get ``--no-python``."""
    words = parse_argv(given["entrypoint"], "the entrypoint")
    if module:
        raise TorchrunConfigError(
            f"module says how Python runs a script, but the entrypoint {list(words)} is a command; remove it."
        )
    options["no-python"] = None
    program = beside_flow(words[0], cwd, flow_dir) if may_come else find_program(words[0], cwd, flow_dir, env)
    source = source_of(program, words, cwd)
    return {"entrypoint": program, "source": source, "command": words, **_arguments(given, words[1:])}


def _arguments(given: Mapping[str, Any], first: Sequence[str] = ()) -> dict[str, Any]:
    more = given.get("entrypoint_args")
    bools = (
        [(str(key), value) for key, value in more.items() if isinstance(value, bool)]
        if isinstance(more, Mapping)
        else []
    )
    return {"args": (*first, *entrypoint_arguments(more)), "bools": tuple(bools)}


def _refuse_what_has_no_use(options: Mapping[str, str | None], env: Mapping[str, str]) -> None:
    for name, why in _REFUSED.items():
        if name in options:
            raise TorchrunConfigError(f"torchrun_args {name} can't be used: {why}")
    for name in OPTIONS:  # torchrun (2.13, argparse_util.py) takes its defaults from such variables
        if (variable := f"PET_{name.upper().replace('-', '_')}") in env:
            raise TorchrunConfigError(f"env sets {variable}, an option of torchrun. Write {name} in torchrun_args.")
    fewest, colon, most = (options.get("nnodes") or "").partition(":")
    if colon and fewest != most:
        raise TorchrunConfigError(
            f"torchrun_args nnodes={fewest}:{most} asks for a gang of changing size, but all nodes take part in a launch: "
            "remove nnodes, and set max_restarts to have all workers start again after a failure."
        )


def _refuse_what_the_gang_decides(options: dict[str, str | None], node: Node) -> None:
    """Drop options that say what the gang does anyway; refuse those that contradict it."""
    size, address = node.num_nodes, "the control node's address, which every node finds by itself"
    addresses = (node.main_addr, bracketed(node.main_addr))
    host, colon, port = (options.get("rdzv-endpoint") or "").rpartition(":")
    if colon and host in addresses:  # it says what the gang does, and pins the port
        options.pop("rdzv-endpoint")
        options.setdefault("master-port", port)
    for name, values, truth in (
        ("nnodes", (str(size), f"{size}:{size}"), f"num_parallel={size}"),
        ("node-rank", (str(node.node_index),), f"current.parallel.node_index={node.node_index}"),
        # With a fixed number of nodes c10d does the same: it waits for all of them.
        ("rdzv-backend", (STATIC_BACKEND, "c10d"), "the gang's own rendezvous (static)"),
        ("master-addr", addresses, address),
        ("rdzv-endpoint", addresses, address),
        ("standalone", (None,) if size == 1 else (), f"num_parallel={size}"),
    ):
        if name in options and (value := options.pop(name)) not in values:
            said = name if value is None else f"{name}={value}"
            raise TorchrunConfigError(f"torchrun_args {said} contradicts {truth}; remove it.")


def _find_entrypoint(entrypoint: Any, is_path: bool, folders: Sequence[str | None], may_come: bool) -> str:
    """Return the path of a script, or the name of what torchrun finds itself: a module or, with no-python, a program."""
    if entrypoint is None or entrypoint == "":
        raise EntrypointError("run() got no entrypoint. Name the script to run: run(entrypoint='train.py').")
    if not isinstance(entrypoint, (str, os.PathLike)):
        raise EntrypointError(
            "run(entrypoint=...) must be the path of a script, a function, or a command as a list, but is a "
            f"{type(entrypoint).__name__}."
        )
    name = os.fsdecode(entrypoint)
    if not is_path:
        return name
    candidates = [os.path.abspath(os.path.join(folder, name)) for folder in folders if folder]
    found = next(filter(os.path.isfile, candidates), candidates[0] if may_come else None)
    if found is not None:
        return found
    if (there := next(filter(os.path.exists, candidates), None)) is not None:
        what = "a folder" if os.path.isdir(there) else "no regular file"
        raise EntrypointError(
            f"The entrypoint {there!r} is {what}. Name a script; a package with a __main__ module is run by "
            "run('package', module=True)."
        )
    looked = " and ".join(dict.fromkeys(candidates))
    raise EntrypointError(
        f"The entrypoint {name!r} does not exist; looked for {looked}. Check the spelling; for a remote task, check that "
        "the file lies beside the flow, so that Metaflow packages it (see --package-suffixes)."
    )


def _folder_of_module(name: str, cwd: str, flow_dir: str | None) -> str | None:
    """Return the flow's folder if a module lies there and not in the working directory, as a script may."""
    path = name.replace(".", os.sep)
    files = (f"{path}.py", os.path.join(path, "__main__.py"))
    for folder in filter(None, (cwd, flow_dir)):
        if any(os.path.isfile(os.path.join(folder, file)) for file in files):
            return None if folder == cwd else os.path.abspath(folder)
    return None


def _local_ranks(value: str | None, nproc: int) -> frozenset[int] | None:
    if value is None:
        return None
    try:
        ranks = frozenset(int(rank) for rank in value.split(","))
        if strange := sorted(ranks - set(range(nproc))):
            raise TorchrunConfigError(
                f"torchrun_args local-ranks-filter has {', '.join(map(str, strange))}, but the local ranks of a node are "
                f"0 to {nproc - 1}."
            )
        return ranks
    except ValueError as error:
        raise TorchrunConfigError(
            f"torchrun_args local-ranks-filter is {value!r}, but it must be local ranks with commas between, as in '0,1'."
        ) from error


def bracketed(addr: str) -> str:
    """Return an address as it stands before a port: IPv6 in brackets."""
    return f"[{addr}]" if ":" in addr and not addr.startswith("[") else addr
