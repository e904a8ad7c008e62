"""The card type ``@card(type="torchrun")``: returns the gang's page.

In the control node's task `task.cards` makes it. Metaflow itself (``flow.py card create``) makes that of a past run from
the datastore. `import metaflow` also loads this module, so slow imports are in the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compat import cards

if TYPE_CHECKING:
    from ..gang.view import GangView


class GangCard(cards.MetaflowCard):  # type: ignore[misc]  # Metaflow is not typed
    """Shows the gang on the control node's task, live and afterwards. Tasks of other nodes make no such card."""

    type = "torchrun"
    RUNTIME_UPDATABLE = True
    RELOAD_POLICY = cards.RELOAD_POLICY

    def render(self, task: Any) -> str:
        """Return the page from the stored records of a task."""
        view = _stored(task.metadata_dict, *task.pathspec.split("/"))
        return page_of_gang(task.pathspec, view, True)


def page_of_gang(pathspec: str, view: GangView | None, is_final: bool) -> str:
    """Return the page of a task; None: nothing is recorded of a gang."""
    from ..elements.model import Sentence
    from .as_card import said
    from .program import program
    from .style import STYLE

    page = _layout(pathspec, view)
    if not is_final and page["contents"][0]["id"] == "gang-outcome":
        server = f"{program().rpartition(' ')[0]} card server"
        text = f"card view shows the gang as it was at this moment. To watch it, run: {server}"
        page["contents"][0]["contents"] += said(Sentence(text, "note"))["contents"]
    return cards.page(pathspec, page, STYLE, is_final)


def sections_of_gang(pathspec: str, view: GangView) -> dict[str, Any]:
    """Return all sections of the page by id; they replace those that a browser shows."""
    return {section["id"]: section for section in _layout(pathspec, view)["contents"]}


def _layout(pathspec: str, view: GangView | None) -> dict[str, Any]:
    from ..elements.model import Sentence
    from .as_card import layout, said
    from .page import Place, page_of
    from .program import program

    if view is not None:
        flow, run, step, task = pathspec.split("/")
        place = Place(flow, run, step, task, ui_url=cards.UI_URL, program=program())
        return layout(page_of(view, place, is_short=True))
    none = (
        "There are no records of a gang with this task. Its step has no @torchrun, or another task is the control node, "
        "or resume has cloned it from the run that has them, or the run is older than such records."
    )
    return {"type": "page", "title": "Gang", "contents": [said(Sentence(none))]}


def _stored(facts: dict[str, str], flow: str, run: str, step: str, task: str) -> GangView | None:
    """Return the stored records of a task; None without any, as for another node's task or an old run."""
    from ..channel.registry import Registry
    from ..compat.datastore import datastore_of_card, last_attempt

    datastore = datastore_of_card(flow, facts)
    attempt = datastore and last_attempt(datastore, (run, step, task))
    return None if attempt is None else Registry(datastore, run, step, task, attempt).load_view()
