"""The list of all features, and which parts each has. A launch works without any of them.

Remove a feature here, with its folder in `features/`, and the rest stays as it is. A part is a module of that folder:
`in_task` runs in the task, and `watch` in each node's supervisor. No part imports another, so each process loads those that
it runs. What the control node keeps of them is in `gang/`.

Only the modules that put a gang together import this one, and those that show one: `WIRE_FEATURES` in the layering test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of these, too, a process needs only its own
    from .launch.services import InTask
    from .node.watchers import Watch

FEATURES = {
    "functions": ("in_task",),
    "outputs": ("in_task",),
    "stacks": ("watch",),
    "progress": ("in_task", "watch"),
    "hangs": ("in_task", "watch"),
    "usage": ("watch",),
    "warm": ("in_task", "watch"),
}


def in_task() -> dict[str, InTask]:
    """Return what features do in the task, by name."""
    return _parts("in_task")


def watches() -> dict[str, Watch]:
    """Return what features do in each node's supervisor, by name."""
    return _parts("watch")


def _parts(part: str) -> dict[str, Any]:
    having = [name for name, parts in FEATURES.items() if part in parts]
    return {name: import_module(f".features.{name}.{part}", __package__).PART for name in having}
