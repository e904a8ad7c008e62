"""How a user calls the flow's commands, and where its cards are."""

from __future__ import annotations

import shlex
import sys

from ..compat.cards import ui_url
from .page import Place


def flow_program() -> str:
    """Return how the flow is called, with its file as it was typed: the folder may be another.

    Metaflow (2.19) gives a task the same name; in a container the file lies in the current folder.
    """
    return f"python {shlex.quote(sys.argv[0])}"


def place_of_card(pathspec: str) -> Place:
    """Return the place of a task whose card shows its gang."""
    flow, run, step, task = pathspec.split("/")
    return Place(flow, run, step, task, ui_url=ui_url(), program=f"{flow_program()} torchrun")
