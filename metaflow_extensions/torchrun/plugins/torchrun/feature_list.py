"""The list of all features, and which parts each has. A launch works without any of them.

Remove a feature here, with its folder in `features/`, and the rest stays as it is. A part is a module of that folder:
`in_task` runs in the task, `watch` in each node's supervisor, `keep` in that of the control node, and `on_page` where a
gang is shown, by a command or on a card. No part imports another, so each process loads those that it runs.

Only the modules that put a gang together import this one, and those that show one: `WIRE_FEATURES` in the layering test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of these, too, a process needs only its own
    from .gang.keepers import Keeper
    from .launch.services import InTask
    from .node.watchers import Watch
    from .records.on_page import OnPage

FEATURES = {
    "functions": ("in_task", "keep"),
    "outputs": ("in_task", "keep", "on_page"),
    "reach": ("watch", "keep", "on_page"),
    "stacks": ("watch", "keep", "on_page"),
    "progress": ("in_task", "watch", "keep", "on_page"),
    "hangs": ("in_task", "watch", "keep", "on_page"),
    "usage": ("watch", "keep", "on_page"),
    "warm": ("in_task", "watch"),
}


def in_task() -> dict[str, InTask]:
    """Return what features do in the task, by name."""
    return _parts("in_task")


def watches() -> dict[str, Watch]:
    """Return what features do in each node's supervisor, by name."""
    return _parts("watch")


def keeps() -> dict[str, type[Keeper]]:
    """Return what features do in the control node's supervisor, by name."""
    return _parts("keep")


def on_page() -> dict[str, OnPage]:
    """Return what is shown of features, by name."""
    return _parts("on_page")


def _parts(part: str) -> dict[str, Any]:
    having = [name for name, parts in FEATURES.items() if part in parts]
    return {name: import_module(f".features.{name}.{part}", __package__).PART for name in having}
