"""How a user calls the flow's commands."""

from __future__ import annotations

import shlex
import sys


def flow_program() -> str:
    """Return how the flow is called, with its file as it was typed: the folder may be another.

    Metaflow (2.19) gives a task the same name; in a container the file lies in the current folder.
    """
    return f"python {shlex.quote(sys.argv[0])}"


def program() -> str:
    """Return how our commands are called in a process of the flow."""
    return f"{flow_program()} torchrun"
