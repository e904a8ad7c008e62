"""The card type ``@card(type="torchrun")``: returns the gang's page.

In the control node's task `task.cards` makes it. Metaflow itself (``flow.py card create``) makes that of a past run from
the datastore. `import metaflow` also loads this module, so slow imports are in the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import cards

if TYPE_CHECKING:
    from ..gang.view import GangView

_NOTHING = (
    "There are no records of a gang with this task. Its step has no @torchrun, or another task is the control node, "
    "or resume has cloned it from the run that has them, or the run is older than such records."
)


class GangCard(cards.MetaflowCard):  # type: ignore[misc]  # Metaflow is not typed
    """Shows the gang on the control node's task, live and afterwards. Tasks of other nodes make no such card."""

    type = "torchrun"
    RUNTIME_UPDATABLE = True
    RELOAD_POLICY = cards.RELOAD_POLICY

    def render(self, task: Any) -> str:
        """Return the page from the stored records of a task, or that there are none."""
        from ..compat.datastore import datastore_of_card
        from .stored_gangs import StoredGangs

        flow, run, step, name = task.pathspec.split("/")
        datastore = datastore_of_card(flow, task.metadata_dict)
        stored = datastore and StoredGangs(datastore)
        found = [gang for gang in (stored and stored.gangs(run, step)) or () if gang.control_task == name]
        return page_of_gang(task.pathspec, stored.registry(found[0]).load_view() if found else None, True)


def page_of_gang(pathspec: str, view: GangView | None, is_final: bool) -> str:
    """Return the page of a task; None: nothing is recorded of a gang."""
    from .parts import said
    from .stored_gangs import flow_program
    from .style import STYLE

    if view is None:
        shown: dict[str, Any] = {"type": "page", "title": "Gang", "contents": [said(_NOTHING)]}
    else:
        shown = _layout(pathspec, view)
        if not is_final:
            text = f"card view shows the gang as it was at this moment. To watch it, run: {flow_program()} card server"
            shown["contents"][0]["contents"] += said(text, "note")["contents"]
    return cards.page(pathspec, shown, STYLE, is_final)


def sections_of_gang(pathspec: str, view: GangView) -> dict[str, Any]:
    """Return all sections of the page by id; they replace those that a browser shows."""
    return {section["id"]: section for section in _layout(pathspec, view)["contents"]}


def _layout(pathspec: str, view: GangView) -> dict[str, Any]:
    from .gang_part import place_of_card
    from .page import page_of
    from .parts import layout

    return layout(page_of(view, place_of_card(pathspec), is_short=True))
