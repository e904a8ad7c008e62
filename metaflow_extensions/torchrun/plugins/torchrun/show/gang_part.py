"""Parts of the gang's page as components of a user's own card."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from metaflow import current

from ..compat import cards
from ..errors import TorchrunConfigError
from ..gang.view import GangView
from .page import SECTION_NAMES, Place, page_of
from .parts import said
from .stored_gangs import flow_program
from .style import PARTS_STYLE


class GangPart(cards.component_class()):  # type: ignore[misc]  # Metaflow is not typed
    """Parts of the gang's page in a user's own card: shows the present state whenever Metaflow renders it."""

    REALTIME_UPDATABLE = True

    def __init__(self, names: tuple[str, ...], shown: Callable[[], GangView | str]) -> None:
        for name in set(names).difference(SECTION_NAMES):
            raise TorchrunConfigError(
                f"current.torch.card knows no part {name!r}. The parts are {', '.join(map(repr, SECTION_NAMES))}."
            )
        self._names = names
        self._shown = shown  # returns what to show, in any thread: the gang, or why not

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the part always shows the present state."""

    @cards.as_component
    def render(self) -> dict[str, Any]:
        """Return the component as plain data, like Metaflow's own components."""
        shown = self._shown()
        if isinstance(shown, str):
            return {**said(shown), "id": self.component_id}
        sections = page_of(shown, place_of_card(current.pathspec), is_short=True).sections
        chosen = [each.component() for each in sections if not self._names or each.name in self._names]
        style = {"type": "markdown", "source": f"<style>{PARTS_STYLE}</style>"}
        return {"type": "section", "id": self.component_id, "contents": [style, *chosen]}


def pointing_at(control: str) -> Callable[[tuple[str, ...]], GangPart]:
    """Return what makes parts for a user's own card on another node: they name `control`, as run, step and task."""
    parallel, task = current.parallel, f"{current.flow_name}/{control}"
    here = f"node {parallel.node_index} (host {socket.gethostname()}) of a gang of {parallel.num_nodes} nodes"
    sentence = f"This is {here}. The card of node 0's task shows the gang: {task}."
    return lambda names: GangPart(names, lambda: sentence)


def place_of_card(pathspec: str) -> Place:
    """Return the place of a task whose card shows its gang."""
    flow, run, step, task = pathspec.split("/")
    return Place(flow, run, step, task, ui_url=cards.UI_URL, program=f"{flow_program()} torchrun")
