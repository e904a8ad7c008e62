"""``@card(type="torchrun")``: the gang's page, as Metaflow asks for it.

It runs in a process of its own, ``flow.py card create``, which Metaflow starts. Metaflow imports this module whenever it
is imported itself, so what takes time is imported where it is needed.
"""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

from metaflow.plugins.cards.card_modules.card import MetaflowCard


class GangCard(MetaflowCard):  # type: ignore[misc]  # Metaflow is not typed
    """Shows the gang on the control node's task, live and afterwards; on another node's task where that is.

    What it shows comes from `border.live_card`, or, where that has said nothing, from the datastore: so the card of a
    past run can be made again, by ``flow.py card create --type torchrun``.
    """

    type = "torchrun"
    RUNTIME_UPDATABLE = True
    RELOAD_POLICY = MetaflowCard.RELOAD_POLICY_ONCHANGE

    def __init__(self, options: Any = None, components: Any = None, graph: Any = None, flow: Any = None) -> None:
        super().__init__()

    def render(self, task: Any) -> str:
        """Return the final page."""
        return _page(task, (self.runtime_data or {}).get("user"), is_final=True)

    def render_runtime(self, task: Any, data: Any) -> str:
        """Return the page of a gang that still runs; `refresh` keeps it up to date."""
        return _page(task, data["user"], is_final=False)

    def refresh(self, task: Any, data: Any) -> dict[str, Any]:
        """Return what is new on the page: all that can change, by its id."""
        from .page import parts

        content = _content(task, data["user"])
        return {part["id"]: part for part in parts(content)} if content else {}

    def reload_content_token(self, task: Any, data: Any) -> str:
        """Return what stays the same while the page need not be loaded again: until the final one is there."""
        return "runtime"


def _content(task: Any, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return what there is to show, with the task's name."""
    content = given or _stored(task)
    return {**content, "task": task.pathspec, "ui_url": _ui_url()}


def _stored(task: Any) -> dict[str, Any]:
    """Return what is stored with the task; nothing where nothing is, as with another node's task or an old run."""
    from metaflow.datastore.exceptions import DataException

    from ..channel.registry import Registry

    flow_name, run_id, step_name, task_id = task.pathspec.split("/")
    datastore = _datastore(flow_name, task.metadata_dict)
    try:
        attempt = datastore and datastore.get_task_datastore(run_id, step_name, task_id, allow_not_done=True).attempt
    except DataException:  # not one has begun
        return {}
    if attempt is None:
        return {}
    return Registry(datastore, run_id, step_name, task_id, attempt).load_events() or {}


def _datastore(flow_name: str, facts: dict[str, str]) -> Any:
    """Return the flow's datastore, as the task's metadata names it, or else as the command does.

    A killed pod leaves no metadata where that is local: the pod's last act is to store it (Metaflow 2.19).
    """
    from metaflow._vendor import click
    from metaflow.datastore import FlowDataStore
    from metaflow.plugins import DATASTORES

    storage = next((each for each in DATASTORES if facts.get("ds-type") == each.TYPE), None)
    if storage is not None:
        return FlowDataStore(flow_name, storage_impl=storage, ds_root=facts.get("ds-root"))
    command = click.get_current_context(silent=True)
    of_command = getattr(command and command.obj, "flow_datastore", None)
    # A new one: in the command's own the root is by now that of the cards (`card` in ``card_cli.py``, 2.19).
    return of_command and FlowDataStore(flow_name, storage_impl=type(of_command._storage_impl))


def _ui_url() -> str | None:
    from metaflow.metaflow_config import UI_URL

    return UI_URL or None


def _page(task: Any, given: dict[str, Any] | None, is_final: bool) -> str:
    """Return the page in the frame of Metaflow's own cards (``card_modules/basic.py``, 2.19)."""
    from metaflow.plugins.cards.card_modules import basic, chevron

    from .page import layout
    from .style import STYLE

    shown = {"metadata": {"pathspec": task.pathspec}, "components": [layout(_content(task, given))]}
    page: str = chevron.render(
        basic.read_file(basic.RENDER_TEMPLATE_PATH),
        {
            "task_data": base64.b64encode(json.dumps(shown).encode()).decode(),
            "javascript": basic.read_file(basic.JS_PATH),
            "css": basic.read_file(basic.CSS_PATH) + STYLE,
            "title": task.pathspec,
            "card_data_id": uuid.uuid4(),
            "RENDER_COMPLETE": is_final,
        },
    )
    return page
