"""Makes the `Call` of one `run`: finds on this node what it names."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..errors import EntrypointError
from ..gang.policy import Group, LaunchPolicy
from ..settings import RunSettings
from ..supervisor.call import Call
from .arguments import Position, entrypoint_arguments

# Options of torchrun about the output of its workers, which goes another way here.
WITHOUT_EFFECT = ("log-dir", "local-ranks-filter")


def make_call(
    run: RunSettings, place: Position, program: dict[str, Any] | None = None, may_come: bool = False, **more: Any
) -> Call:
    """Find what `run` names on this node; `more` are further fields of `Call`.

    `program` has those that say what torchrun runs for a function. `may_come`: what runs before may still make the
    entrypoint.
    """
    options = {name: value for name, value in run.options.items() if name not in WITHOUT_EFFECT}
    cwd = run.cwd or os.getcwd()
    folders = [cwd, *filter(None, [place.flow_dir])]
    if program is None and run.command:
        name, *rest = run.command
        found = _find_program(name, folders, run.env, may_come)
        program = {"entrypoint": found, "command": run.command, **_arguments(run, rest)}
        options["no-python"] = None
    elif program is None:
        name = _name_of(run.entrypoint)
        is_path = not run.module and "no-python" not in options
        program = {"entrypoint": _find(name, folders, "entrypoint", may_come) if is_path else name, **_arguments(run)}
        program["module_folder"] = _folder_of_module(name, folders) if run.module else None
    same = {each.name: getattr(run, each.name) for each in fields(Call) if hasattr(run, each.name)}
    here = {
        "num_nodes": place.num_nodes,
        "node_index": place.node_index,
        "main_addr": place.main_addr,
        "group": Group(place.num_nodes - run.spare_nodes),
        "python": sys.executable,
        "env": dict(run.env or {}),
        "cwd": cwd,
        "options": options,
        "policy": LaunchPolicy(**{each.name: getattr(run, each.name) for each in fields(LaunchPolicy)}),
        "logs": run.logs_of(place.num_nodes),
        "before_run": tuple((_find_program(words[0], folders, {}, True), *words[1:]) for words in run.before_run or ()),
    }
    return Call(**{**same, **here, **program, **more})


def _arguments(run: RunSettings, first: Sequence[str] = ()) -> dict[str, Any]:
    more = run.entrypoint_args
    named = more.items() if isinstance(more, Mapping) else ()
    bools = tuple((str(key), value) for key, value in named if isinstance(value, bool))
    return {"args": (*first, *entrypoint_arguments(more)), "bools": bools}


def _name_of(entrypoint: Any) -> str:
    if entrypoint is None or entrypoint == "":
        raise EntrypointError("run() got no entrypoint. Name the script to run: run(entrypoint='train.py').")
    if not isinstance(entrypoint, (str, os.PathLike)):
        raise EntrypointError(
            "run(entrypoint=...) must be the path of a script, a function, or a command as a list, but is a "
            f"{type(entrypoint).__name__}."
        )
    return os.fsdecode(entrypoint)


def _find(name: str, folders: Sequence[str], what: str, may_come: bool) -> str:
    """Return the path of a file that the user names, out of the working directory or else beside the flow file."""
    candidates = [os.path.abspath(os.path.join(folder, name)) for folder in folders]
    found = next(filter(os.path.exists, candidates), None)
    if may_come:
        return found or candidates[0]
    if found is None:
        raise EntrypointError(
            f"The {what} {name!r} does not exist; looked for {' and '.join(dict.fromkeys(candidates))}. Check the spelling; "
            "for a remote task, check that the file lies beside the flow, so that Metaflow packages it (see "
            "--package-suffixes)."
        )
    if not os.path.isfile(found):
        raise EntrypointError(
            f"The {what} {found!r} is {'a folder' if os.path.isdir(found) else 'no regular file'}. Name a file; a package "
            "with a __main__ module is run by run('package', module=True)."
        )
    return found


def _find_program(name: str, folders: Sequence[str], env: Mapping[str, str] | None, may_come: bool) -> str:
    """Return a command's program for its argv: a path is found as a script is, a bare name in the PATH of `env`."""
    if os.sep in name:
        found = _find(name, folders, "program", may_come)
        if not may_come and not os.access(found, os.X_OK):
            raise EntrypointError(
                f"The program {found} may not be executed. Make it executable (chmod +x), or name what runs it, as in "
                f"['sh', {name!r}]."
            )
        return found
    path = {**os.environ, **(env or {})}.get("PATH", os.defpath)
    if not may_come and shutil.which(name, path=path) is None:
        is_here = os.path.isfile(os.path.join(folders[0], name))
        hint = f" To run the file of that name, write './{name}'." if is_here else ""
        raise EntrypointError(f"There is no program {name!r} in the PATH of this node ({path}).{hint}")
    return name


def _folder_of_module(name: str, folders: Sequence[str]) -> str | None:
    """Return the flow's folder if a module lies there and not in the working directory, as a script may."""
    path = name.replace(".", os.sep)
    files = (f"{path}.py", os.path.join(path, "__main__.py"))
    found = next((folder for folder in folders if any(os.path.isfile(os.path.join(folder, f)) for f in files)), None)
    return None if found == folders[0] else found
