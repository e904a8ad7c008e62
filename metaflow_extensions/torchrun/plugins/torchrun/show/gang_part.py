"""Parts of the gang's page as components of a user's own card."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from metaflow import current

from ..compat import cards
from ..elements.model import Sentence
from ..errors import TorchrunConfigError
from ..gang.view import GangView
from .as_card import part, said
from .page import SECTION_NAMES, Place, page_of
from .program import program


class GangPart(cards.component_class()):  # type: ignore[misc]  # Metaflow is not typed
    """Parts of the gang's page in a user's own card: shows the present state whenever Metaflow renders it."""

    REALTIME_UPDATABLE = True

    def __init__(self, names: tuple[str, ...], shown: Callable[[], GangView | Sentence]) -> None:
        unknown = [name for name in names if name not in SECTION_NAMES]
        if unknown:
            raise TorchrunConfigError(
                f"current.torch.card knows no part {unknown[0]!r}. The parts are {', '.join(map(repr, SECTION_NAMES))}."
            )
        self._names = names
        self._shown = shown  # returns what to show, in any thread: the gang, or why not

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the part always shows the present state."""

    @cards.as_component
    def render(self) -> dict[str, Any]:
        """Return the component as plain data, like Metaflow's own components."""
        shown = self._shown()
        if isinstance(shown, Sentence):
            return {**said(shown), "id": self.component_id}
        page = page_of(shown, _this_task(), is_short=True)
        return part(self.component_id, page, self._names)


def pointing_at(control: str) -> Callable[[tuple[str, ...]], GangPart]:
    """Return what makes parts for a user's own card on another node: they name `control`, as run, step and task."""
    parallel, task = current.parallel, f"{current.flow_name}/{control}"
    here = f"node {parallel.node_index} (host {socket.gethostname()}) of a gang of {parallel.num_nodes} nodes"
    sentence = Sentence(f"This is {here}. The card of node 0's task shows the gang: {task}.")
    return lambda names: GangPart(names, lambda: sentence)


def _this_task() -> Place:
    flow, run, step, task = map(str, (current.flow_name, current.run_id, current.step_name, current.task_id))
    return Place(flow, run, step, task, ui_url=cards.UI_URL, program=program())
