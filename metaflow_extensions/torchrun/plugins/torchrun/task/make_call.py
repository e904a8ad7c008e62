"""Makes the `Call` of one `run`: finds on this node what it names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import EntrypointError, TorchrunConfigError
from ..supervisor.call import Call, FunctionSpec
from .arguments import Position, entrypoint_arguments
from .commands import beside_flow, find_program, source_of
from .run_settings import RunSettings


def make_call(
    run: RunSettings, place: Position, function: FunctionSpec | None = None, may_come: bool = False, **fields: Any
) -> Call:
    """Find what `run` names on this node; `fields` are further ones of `Call`.

    `function` is what the workers call if the entrypoint is one. `may_come`: what runs before may still make the entrypoint.
    """
    options, cwd = dict(run.options), run.cwd or os.getcwd()
    options.pop("log-dir", None)  # has no effect
    local_ranks = _local_ranks(options.pop("local-ranks-filter", None), fields["nproc"])
    if function is not None:
        program: dict[str, Any] = {"entrypoint": function.script, "args": (function.folder,)}
        program |= {"source": function.source, "function": function}
    elif run.command:
        program = _command(run, cwd, place.flow_dir, may_come)
        options["no-python"] = None
    else:
        is_path, folders = not run.module and "no-python" not in options, (cwd, place.flow_dir)
        found = _find_entrypoint(run.entrypoint, is_path, folders, may_come)
        program = {"entrypoint": found, **_arguments(run)}
        program["module_folder"] = _folder_of_module(found, *folders) if run.module else None
    return Call(
        **program,
        module=run.module,
        num_nodes=place.num_nodes,
        node_index=place.node_index,
        main_addr=place.main_addr,
        group=place.group,
        python=sys.executable,
        master_port=run.master_port,
        shown_local_ranks=local_ranks,
        env=dict(run.env),
        cwd=cwd,
        options=options,
        warm=run.warm,
        **fields,
    )


def _command(run: RunSettings, cwd: str, flow_dir: str | None, may_come: bool) -> dict[str, Any]:
    name, *rest = run.command
    program = beside_flow(name, cwd, flow_dir) if may_come else find_program(name, cwd, flow_dir, run.env)
    source = source_of(program, run.command, cwd)
    return {"entrypoint": program, "source": source, "command": run.command, **_arguments(run, rest)}


def _arguments(run: RunSettings, first: Sequence[str] = ()) -> dict[str, Any]:
    more = run.entrypoint_args
    named = more.items() if isinstance(more, Mapping) else ()
    bools = tuple((str(key), value) for key, value in named if isinstance(value, bool))
    return {"args": (*first, *entrypoint_arguments(more)), "bools": bools}


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
        ranks = frozenset(map(int, value.split(",")))
    except ValueError as error:
        raise TorchrunConfigError(
            f"torchrun_args local-ranks-filter is {value!r}, but it must be local ranks with commas between, as in '0,1'."
        ) from error
    if strange := sorted(ranks - set(range(nproc))):
        raise TorchrunConfigError(
            f"torchrun_args local-ranks-filter has {', '.join(map(str, strange))}, but the local ranks of a node are "
            f"0 to {nproc - 1}."
        )
    return ranks
