"""Checks and converts the values of settings.

Each function gets a value and the name of its setting, and raises `TorchrunConfigError` if the value is wrong.
``--with torchrun:key=value`` sends strings, so every value may be one.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .errors import TorchrunConfigError

# The classes of causes (see `cause.Cause.category`) that a new generation on the same nodes may mend.
RETRY_CLASSES = ("user", "killed", "timeout", "hang", "start", "network", "node_lost", "preempted")
DEFAULT_RESTART_ON = frozenset({"user", "killed", "timeout", "hang", "node_lost", "preempted"})


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return " Did you mean NAME?" with the most similar known name; empty if none is similar."""
    import difflib  # imported late: every flow imports this module, and few need this

    near = [*difflib.get_close_matches(name, known, n=1), *(each for each in known if each.startswith(name))]
    return f" Did you mean {near[0]}?" if near else ""


def _refused(value: Any, setting: str, why: str) -> TorchrunConfigError:
    return TorchrunConfigError(f"{setting} is {value!r}, but {why}.")


# --- numbers and words --------------------------------------------------------------------------------


def parse_int(value: Any) -> int | None:
    """Return `value` as an int if it is a whole number or the text of one, else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_whole(value: Any, setting: str, least: int = 0, most: float = math.inf, or_else: str = "") -> int:
    """Return a whole number between two others."""
    number = parse_int(value)
    if number is None or not least <= number <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise _refused(value, setting, f"it must be a whole number {limits}{or_else}")
    return number


def parse_port(value: Any, setting: str) -> int | None:
    """Return a port as an int; ``""`` leaves the choice to the kernel."""
    return None if value == "" else parse_whole(value, setting, 1, 65535)


def parse_nproc(value: Any, setting: str) -> int | str:
    """Return a number of processes per node as an int, or a word."""
    if (word := str(value).strip().lower()) in ("auto", "cpu", "gpu"):
        return word
    # Above, it is a typing error: each takes over 100 MB.
    return parse_whole(value, setting, 1, 1024, " or one of 'auto', 'cpu', 'gpu'")


def parse_seconds(value: Any, setting: str, zero: bool = False) -> float:
    """Return a time in seconds; `zero` says whether it may be 0."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise _refused(value, setting, f"it must be a number of seconds {'of at least' if zero else 'above'} 0")
    return number


def parse_flag(value: Any, setting: str) -> bool:
    """Return True or False."""
    if value is not True and value is not False:
        raise _refused(value, setting, "it must be True or False")
    return bool(value)


def parse_word(value: Any, setting: str, words: Sequence[str]) -> str:
    """Return one of some words."""
    word = str(value).strip().lower()
    if word not in words:
        raise _refused(value, setting, f"it must be one of {', '.join(map(repr, words))}")
    return word


parse_logs = partial(parse_word, words=("all", "node", "rank0"))
parse_process_group = partial(parse_word, words=("gloo", "nccl", "auto"))
parse_outputs_from = partial(parse_word, words=("control", "all"))


def parse_warm(value: Any, setting: str) -> str:
    """Return which processes start warm: ``"agent"``, ``"workers"`` or ``"off"``, which False means."""
    is_off = str(value).strip().lower() in ("false", "0", "off")
    return "off" if is_off else parse_word(value, setting, ("agent", "workers", "False"))


def _names_in(value: Any, setting: str, why: str) -> list[str]:
    """Return names from a list, or from a text with commas between; `why` is said of something else."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple, set, frozenset)) or not all(isinstance(word, str) for word in words):
        raise _refused(value, setting, why)
    return [word.strip() for word in words if word.strip()]


def parse_modules(value: Any, setting: str) -> tuple[str, ...]:
    """Return names of modules."""
    names = _names_in(value, setting, "it must be a list of names of modules")
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise TorchrunConfigError(f"{setting} has {name!r}, which can't be the name of a module.")
    return tuple(names)


def parse_restart_on(value: Any, setting: str) -> frozenset[str]:
    """Return the classes of causes that restart the gang, out of `RETRY_CLASSES`."""
    known = ", ".join(RETRY_CLASSES)
    names = _names_in(value, setting, f"it must be a list out of {known}")
    for name in sorted(set(names).difference(RETRY_CLASSES)):
        hint = did_you_mean(name, RETRY_CLASSES)
        raise TorchrunConfigError(
            f"{setting} has {name!r}, which is no class of failures after which workers are started again.{hint} Choose out "
            f"of {known}; Metaflow's @retry starts a new gang after all others."
        )
    return frozenset(names)


def parse_signal(value: Any, setting: str) -> int:
    """Return the number of a signal that a process can handle, given by name (``"SIGUSR1"``, ``"usr1"``) or number."""
    text = str(value).strip().upper()
    named = getattr(signal, text if text.startswith("SIG") else f"SIG{text}", None)
    # The module `signal` also has constants that are no signals, such as SIG_IGN and SIG_BLOCK.
    number = parse_int(text) if text.isdecimal() else named if isinstance(named, signal.Signals) else None
    if isinstance(value, bool) or number not in signal.valid_signals():
        raise _refused(value, setting, "it must be a signal, such as 'SIGUSR1'")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise TorchrunConfigError(f"{setting} is {value!r}, which no process can heed to save its work.")
    return int(number)


# --- files and variables ------------------------------------------------------------------------------


def parse_outputs(value: Any, setting: str) -> tuple[str, ...]:
    """Return patterns of files and folders, each relative to a folder and without a slash at its end."""
    given = [value] if isinstance(value, str | os.PathLike) else value
    is_list = isinstance(given, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(one, str | os.PathLike) for one in given):
        raise _refused(value, setting, "it must be a list of files, folders and patterns, as in ['model/', '*.json']")
    names = [os.fsdecode(one) for one in given]
    for name in names:
        parts, why = name.split("/"), ""
        if not name.strip() or "\0" in name or os.path.isabs(name) or ".." in parts:
            why = "names no file below the workers' working directory (cwd=...). Give its path relative to that"
        elif any("**" in part and part != "**" for part in parts):
            why = "must have '**', which stands for any folders, as a part of its own, as in 'logs/**/*.json'"
        if why:
            raise TorchrunConfigError(f"{setting} has {name!r}, which {why}.")
    return tuple(dict.fromkeys(os.path.normpath(name) for name in names))


def parse_env(value: Any, setting: str) -> dict[str, str]:
    """Return variables of an environment; a text is a JSON object. No error has a value, which may be a secret."""
    value = _from_json(value)
    if not isinstance(value, Mapping):
        raise TorchrunConfigError(f"{setting} must be a dict of variables, but is a {type(value).__name__}.")
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or text is None:
            raise TorchrunConfigError(
                f"{setting}: {name!r} can't be an environment variable: a name is a text without '=', a value is not None."
            )
        check_word(f"{name}={text}", f"{setting}: {name}")
    return {name: str(text) for name, text in value.items()}


# In bytes. Linux ends it with a NUL (MAX_ARG_STRLEN in <linux/binfmts.h>: 32 pages); else execve fails with E2BIG.
_MAX_WORD = 32 * os.sysconf("SC_PAGE_SIZE") - 1


def check_word(word: str, name: str) -> str:
    """Return a word that a process can be given, as an argument or as `NAME=value`; raise an error with `name` for others."""
    try:
        data = os.fsencode(word)
    except UnicodeEncodeError:
        data = b"\0"
    if b"\0" not in data and len(data) <= _MAX_WORD:
        return word
    why = "has a NUL character or half of a surrogate pair, which no process can be given"
    if b"\0" not in data:
        why = f"has {len(data)} bytes, but Linux gives a process at most {_MAX_WORD} in one argument or variable"
    raise TorchrunConfigError(f"{name} {why}. Write it to a file, and give the path of that file.")


def parse_path(value: Any, setting: str) -> str:
    """Return the path of a folder, which need not exist on this machine."""
    if not isinstance(value, str | os.PathLike) or "\0" in os.fsdecode(value):
        raise _refused(value, setting, "it must be the path of a folder")
    return os.fsdecode(value)


def parse_folder(value: Any, setting: str) -> str:
    """Return the absolute path of a folder that exists on this node."""
    folder = os.path.abspath(parse_path(value, setting))
    if not os.path.isdir(folder):
        raise _refused(value, setting, f"{folder} is not a folder on this node")
    return folder


# --- commands -----------------------------------------------------------------------------------------

SHELL = ("sh", "-ec")
"""The words before a line that a shell runs."""


def is_by_shell(words: Sequence[str]) -> bool:
    """Return whether a command is a line for the shell."""
    return len(words) == 3 and tuple(words[:2]) == SHELL


def parse_argv(value: Any, setting: str) -> tuple[str, ...]:
    """Return a command as argv words; raises TorchrunConfigError for words that no process can get."""
    if not isinstance(value, list | tuple) or not all(isinstance(word, str | os.PathLike) for word in value):
        raise _refused(value, setting, "a command is a list of texts and paths, such as ['python', '-O', 'x.py']")
    words = tuple(os.fsdecode(word) for word in value)
    if not words or not words[0]:
        raise TorchrunConfigError(f"{setting} is {value!r}, which names no program.")
    if words[0].startswith("-"):
        raise TorchrunConfigError(
            f"{setting} begins with {words[0]!r}, but the first word of a command is a program. Options of torchrun "
            "go to torchrun_args."
        )
    return tuple(check_word(word, f"{setting}, word {number}") for number, word in enumerate(words, 1))


def parse_commands(value: Any, setting: str) -> tuple[tuple[str, ...], ...]:
    """Return commands as one argv for each: a list of words as it is, a text as a line for the shell.

    A text in the place of the list is read as JSON.
    """
    given, example = _from_json(value), "[['pip', 'install', '-r', 'requirements.txt'], 'make data']"
    if not isinstance(given, list | tuple):
        raise _refused(value, setting, f"it must be a list of commands, such as {example}")
    commands = []
    for number, each in enumerate(given, 1):
        name = f"{setting}, command {number}"
        if isinstance(each, str) and each.lstrip().startswith("-"):
            raise _refused(each, name, f"the words of one command are a list of their own: {example}")
        commands.append(parse_argv([*SHELL, each] if isinstance(each, str) else each, name))
    return tuple(commands)


def _from_json(value: Any) -> Any:
    """Return what a text says in JSON, as ``--with torchrun:env={...}`` sends it; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
