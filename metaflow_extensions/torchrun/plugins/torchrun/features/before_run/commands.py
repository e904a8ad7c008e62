"""The commands of ``run(before_run=...)``: as they are given, shown, and started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ...errors import TorchrunConfigError
from ...launch.commands import SHELL, argv_of, is_by_shell, system_program

_SHOWN_CHARS = 200
_EXAMPLE = "before_run=[['pip', 'install', '-r', 'requirements.txt'], 'make data']"


def before_commands(given: Any) -> tuple[tuple[str, ...], ...] | None:
    """Return ``before_run`` as one argv for each command; None if there is none."""
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise TorchrunConfigError(
            f"run(before_run=...) must be a list of commands, but is a {type(given).__name__}. Write {_EXAMPLE}."
        )
    return tuple(_before_command(each, f"before_run[{number}]") for number, each in enumerate(given))


def _before_command(given: Any, setting: str) -> tuple[str, ...]:
    if not isinstance(given, str):
        return argv_of(given, setting)
    if not given.strip():
        raise TorchrunConfigError(f"{setting} is an empty command.")
    if given.lstrip().startswith("-"):
        raise TorchrunConfigError(
            f"{setting} is {given!r}, which is no command. The words of one command are a list of their own: {_EXAMPLE}."
        )
    return argv_of([*SHELL, given], setting)


def shown(words: Sequence[str]) -> str:
    """Return a command for a line of a log."""
    text = words[2] if is_by_shell(words) else shlex.join(words)
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"


def for_process(words: Sequence[str]) -> list[str]:
    """Return the argv of a command for the process that runs it, whatever PATH that has."""
    return [system_program(words[0]), *words[1:]] if is_by_shell(words) else list(words)
