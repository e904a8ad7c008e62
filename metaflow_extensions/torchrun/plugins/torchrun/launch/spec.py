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
from ..gang.group import Group
from .arguments import entrypoint_arguments
from .commands import beside_flow, find_program, source_of
from .options import Node
from .run_settings import RunSettings


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
    env: tuple[tuple[str, str], ...] = ()  # what the user sets for this launch
    cwd: str | None = None  # absolute path; None is the task's own
    function: FunctionSpec | None = None  # what the entrypoint calls, where that is ours
    source: str | None = None  # the file that must be the same on all nodes; None means the entrypoint
    bools: tuple[tuple[str, bool], ...] = ()  # of `args`, those that were given as True or False, by their names
    command: tuple[str, ...] = ()  # the words of a command as entrypoint, as they were given
    module_folder: str | None = None  # where the workers find the module, unless Python finds it without that
    group: Group | None = None  # the nodes that take part; None: all

    @property
    def world_size(self) -> int:
        """Number of workers over all nodes."""
        return self.nproc * self.group_size

    @property
    def group_size(self) -> int:
        """Number of nodes that take part."""
        return self.num_nodes if self.group is None else self.group.size

    @property
    def group_rank(self) -> int | None:
        """This node's rank among them; None if it takes no part."""
        return self.node_index if self.group is None else self.group.rank_of(self.node_index)

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a worker of this node."""
        assert self.group_rank is not None, f"node {self.node_index} takes no part"
        return self.group_rank * self.nproc + local_rank

    @property
    def ranks(self) -> range:
        """The global ranks of this node, in the order of the local ones."""
        return range(0) if self.group_rank is None else range(self.global_rank(0), self.global_rank(self.nproc))

    def digest(self) -> str:
        """Return a fingerprint of what must be the same on every node."""
        options = [option for option in self.options if option[0] != "rdzv-id"]
        name = os.path.basename(self.entrypoint) if self.function is None else self.function.name
        what = [name, self.module, options]
        what += [[os.path.basename(word) for word in self.command]] if self.command else []
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def build_spec(
    run: RunSettings, nproc: int, node: Node, function: FunctionSpec | None = None, may_come: bool = False
) -> LaunchSpec:
    """Find what `run` names on this node, and return the launch.

    `function` is what the workers call if the entrypoint is one. `may_come`: what runs before may still make the entrypoint.
    """
    options = dict(run.options)
    options.pop("log-dir", None)  # has no effect
    folders, local_ranks = (run.cwd or os.getcwd(), node.flow_dir), options.pop("local-ranks-filter", None)
    if function is not None:
        program: dict[str, Any] = {"entrypoint": function.script, "args": (function.folder,)}
        program |= {"source": function.source, "function": function}
    elif run.command:
        program = _command(run, node.flow_dir, may_come)
        options["no-python"] = None
    else:
        is_path = not run.module and "no-python" not in options
        found = _find_entrypoint(run.entrypoint, is_path, folders, may_come)
        program = {"entrypoint": found, **_arguments(run)}
        program["module_folder"] = _folder_of_module(found, *folders) if run.module else None
    return LaunchSpec(
        **program,
        module=run.module,
        nproc=nproc,
        num_nodes=node.num_nodes,
        node_index=node.node_index,
        group=node.group,
        python=sys.executable,
        master_port=run.master_port,
        shown_local_ranks=_local_ranks(local_ranks, nproc),
        env=tuple(run.env.items()),
        cwd=run.cwd,
        options=tuple(options.items()),
    )


# What workers run, as fields of `LaunchSpec`. ------------------------------------------------------


def _command(run: RunSettings, flow_dir: str | None, may_come: bool) -> dict[str, Any]:
    name, *rest = run.command
    program = beside_flow(name, run.cwd, flow_dir) if may_come else find_program(name, run.cwd, flow_dir, run.env)
    source = source_of(program, run.command, run.cwd)
    return {"entrypoint": program, "source": source, "command": run.command, **_arguments(run, rest)}


def _arguments(run: RunSettings, first: Sequence[str] = ()) -> dict[str, Any]:
    more = run.entrypoint_args
    bools = (
        [(str(key), value) for key, value in more.items() if isinstance(value, bool)]
        if isinstance(more, Mapping)
        else []
    )
    return {"args": (*first, *entrypoint_arguments(more)), "bools": tuple(bools)}


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
