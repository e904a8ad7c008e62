"""Checks commands of the user, which are lists of words: the entrypoint, and those of before_run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from ..errors import EntrypointError
from ..parsing import is_by_shell


def flow_folder() -> str | None:
    """Return the folder of the flow file, which is the program that Metaflow runs."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else None


def find_program(name: str, cwd: str, flow_dir: str | None, env: Mapping[str, str]) -> str:
    """Return a command's program for its argv; raises EntrypointError if there is none.

    A path is looked for in the working directory, then beside the flow file, as scripts are; a bare name in the PATH of
    `env`.
    """
    if os.sep not in name:
        path = _path_of(env)
        if shutil.which(name, path=path) is None:
            hint = f" To run the file of that name, write './{name}'." if os.path.isfile(_join(cwd, name)) else ""
            raise EntrypointError(f"There is no program {name!r} in the PATH of this node ({path}).{hint}")
        return name
    found = beside_flow(name, cwd, flow_dir)
    full = _join(cwd, found)
    if os.path.isdir(full):
        raise EntrypointError(f"The program {name!r} is a folder: {full}. Name the file to run.")
    if not os.path.isfile(full):
        looked = dict.fromkeys([full, *([] if flow_dir is None else [_join(flow_dir, name)])])
        raise EntrypointError(f"The program {name!r} does not exist; looked for {' and '.join(looked)}.")
    if not os.access(full, os.X_OK):
        raise EntrypointError(
            f"The program {full} may not be executed. Make it executable (chmod +x), or name what runs it, as in "
            f"['sh', {name!r}]."
        )
    return found


def beside_flow(name: str, cwd: str, flow_dir: str | None) -> str:
    """Return a relative path beside the flow file if the program is there and not in the working directory."""
    if os.sep not in name or flow_dir is None or os.path.exists(_join(cwd, name)):
        return name
    beside = _join(flow_dir, name)
    return beside if os.path.exists(beside) else name


def source_of(program: str, words: Sequence[str], cwd: str) -> str | None:
    """Return the main file of a command: a program given by its path, or the first word that is a file."""
    names = [program] if os.sep in program else words[1:]
    return next((path for path in (_join(cwd, name) for name in names) if os.path.isfile(path)), None)


def foreign_python(words: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return a warning if a command's ``python`` or ``pip`` belongs to another installation than the step's, else None."""
    text = words[2] if is_by_shell(words) else "".join(words[:1])
    name = next(iter(text.split()), "")
    found = re.fullmatch(r"(python|pip)[0-9.]*", name) and shutil.which(name, path=_path_of(env))
    if not found or os.path.realpath(os.path.dirname(found)) == os.path.realpath(os.path.dirname(sys.executable)):
        return None
    own = "[sys.executable, '-m', 'pip', ...]" if name.startswith("pip") else "[sys.executable, ...]"
    return f"{name} is {found}, but this step runs under {sys.executable}; to use that one, write {own}"


def _path_of(env: Mapping[str, str]) -> str:
    return env.get("PATH", os.environ.get("PATH", os.defpath))


def _join(folder: str, name: str) -> str:
    return os.path.abspath(os.path.join(folder, name))
