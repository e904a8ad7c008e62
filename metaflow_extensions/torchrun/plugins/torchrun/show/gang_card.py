"""The card type ``@card(type="torchrun")``: returns the gang's page to Metaflow.

It runs in a separate process, ``flow.py card create``, which Metaflow starts. `import metaflow` also loads this module,
so slow imports are in the functions that need them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..compat import cards

if TYPE_CHECKING:
    from ..records.snapshot import Snapshot


class GangCard(cards.MetaflowCard):  # type: ignore[misc]  # Metaflow is not typed
    """Shows the gang on the control node's task, live and afterwards. Tasks of other nodes make no such card.

    The page comes from `show.live_card`, or else from the datastore. So ``flow.py card create --type torchrun`` can make
    the card of a past run again.
    """

    type = "torchrun"
    RUNTIME_UPDATABLE = True
    RELOAD_POLICY = cards.RELOAD_POLICY

    def render(self, task: Any) -> str:
        """Return the final page."""
        return _page(task, (self.runtime_data or {}).get("user"), True)

    def render_runtime(self, task: Any, data: Any) -> str:
        """Return the page of a running gang; `refresh` keeps it up to date."""
        return _page(task, data["user"], False)  # `card view` shows nothing later; `refresh` replaces it elsewhere

    def refresh(self, task: Any, data: Any) -> dict[str, Any]:
        """Return all sections of the page by id; they replace those that are shown."""
        return {section["id"]: section for section in _layout(task, data["user"])["contents"]}

    def reload_content_token(self, task: Any, data: Any) -> str:
        """Return a constant: browsers need not load the page again before the final one."""
        return "runtime"


def final(pathspec: str, given: dict[str, Any], is_page: bool) -> Any:
    """Return the final page of a task, or its sections by id; `given` is the data of `show.live_card`."""
    task = SimpleNamespace(pathspec=pathspec)
    return _page(task, given, True) if is_page else GangCard().refresh(task, {"user": given})


def _page(task: Any, given: dict[str, Any] | None, is_final: bool) -> str:
    from ..elements.model import Sentence
    from .as_card import said
    from .program import program
    from .style import STYLE

    page = _layout(task, given)
    if not is_final and page["contents"][0]["id"] == "gang-outcome":
        server = f"{program().rpartition(' ')[0]} card server"
        text = f"card view shows the gang as it was at this moment. To watch it, run: {server}"
        page["contents"][0]["contents"] += said(Sentence(text, "note"))["contents"]
    return cards.page(task.pathspec, page, STYLE, is_final)


def _layout(task: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the page of a task; `given` is the data of `show.live_card`."""
    from ..elements.model import Sentence
    from ..feature_list import on_page
    from ..records.snapshot import Snapshot
    from .as_card import layout, said
    from .page import Place, page_of
    from .program import program

    flow, run, step, task_id = task.pathspec.split("/")
    place = Place(flow, run, step, task_id, ui_url=cards.ui_url(), program=program())
    snapshot = Snapshot.read(given) if given else _stored(task.metadata_dict, flow, run, step, task_id)
    if snapshot is not None:
        return layout(page_of(snapshot, place, on_page(), is_short=True))
    none = (
        "There are no records of a gang with this task. Its step has no @torchrun, or another task is the control node, "
        "or resume has cloned it from the run that has them, or the run is older than such records."
    )
    return {"type": "page", "title": "Gang", "contents": [said(Sentence(none))]}


def _stored(facts: dict[str, str], flow: str, run: str, step: str, task: str) -> Snapshot | None:
    """Return the stored records of a task; None without any, as for another node's task or an old run."""
    from ..channel.registry import Registry
    from ..compat.stored import datastore_of_card, last_attempt

    datastore = datastore_of_card(flow, facts)
    attempt = datastore and last_attempt(datastore, (run, step, task))
    return None if attempt is None else Registry(datastore, run, step, task, attempt).load_snapshot()
