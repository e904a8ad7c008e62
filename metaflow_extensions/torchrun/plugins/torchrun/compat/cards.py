"""Private names of Metaflow's cards: ``metaflow/plugins/cards``, read in 2.13 and 2.19.39.

`import metaflow` loads this module, so imports are in the functions that need them.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from metaflow import current

from .renamed import convenience, known

_PROCESS_S = 30.0  # then Metaflow's next one kills it
_COMPONENTS = "metaflow.plugins.cards.card_modules.components"
MetaflowCard: Any = known("metaflow.plugins.cards.card_modules.card:MetaflowCard", object)
RELOAD_POLICY = getattr(MetaflowCard, "RELOAD_POLICY_ONCHANGE", "onchange")
Make = Callable[[Mapping[str, str], bool], object]
"""Makes a card of our type; gets the command's options, and whether it is the last time."""


# --- the cards of a task; each is a `CardComponentManager` ------------------------------------------


def of_type(kind: str) -> list[Any]:
    """Return the task's cards of a type."""
    collector = current.get("card")
    return [] if collector is None else list(collector.get(kind))


def with_component(kind: type) -> list[Any]:
    """Return the task's cards that have a component of a class and can be renewed while the task runs."""
    collector = current.get("card")
    managers = [] if collector is None else list(collector._card_component_store.values())
    return [card for card in managers if card._card_creator_args["runtime_card"] and _has(card, kind)]


def _has(card: Any, kind: type) -> bool:
    # The step's code may add components meanwhile, so iterate over a copy: `list` makes it in one go.
    return any(isinstance(component, kind) for component in list(card.components.values()))


def renew_users(card: Any) -> None:
    """Renew a card of the user's own; its data, and the time before which Metaflow drops a refresh of the user's, stay."""
    from metaflow.plugins.cards.card_creator import CardProcessManager

    process, _ = CardProcessManager._get_card_process(card._card_creator_args["card_uuid"])
    with suppress(subprocess.TimeoutExpired):
        if process is not None:  # while it runs, Metaflow drops a refresh
            process.wait(_PROCESS_S)
    before = card._last_refresh
    card.refresh(card._latest_user_data)
    card._last_refresh = before


def datastore_here() -> Any:
    """Return the datastore of the task's flow, with its metadata; None in a thread that is not the task's first."""
    from metaflow._vendor import click

    command = click.get_current_context(silent=True)
    return getattr(command and command.obj, "flow_datastore", None)


def make(card: Any, mode: str, is_final: bool) -> None:
    """Make a card; a final one of Metaflow's is waited for."""
    card._card_creator.create(**card._card_creator_args, mode=mode, final=is_final)


def make_here(cards: Sequence[Any], make_ours: Make) -> None:
    """Have cards of our type made by `make_ours`, in this process; Metaflow makes the others.

    One `CardCreator` serves all cards of a task.
    """
    for creator in {id(card._card_creator): card._card_creator for card in cards}.values():
        creator._run_command = partial(_run_command, creator._run_command, make_ours)


def _run_command(
    run: Callable[..., tuple[bytes, bool]], make_ours: Make, command: Sequence[str], *args: Any, **options: Any
) -> tuple[bytes, bool]:
    given = dict(reversed(list(pairwise(command))))  # the first counts: an id may be "create"
    if given.get("--type") != "torchrun":
        return run(command, *args, **options)
    with convenience("the gang's card"):
        make_ours(given, options.get("wait", True))
    for name in ("--data-file", "--component-file"):
        if name in given:
            with suppress(OSError):
                os.remove(given[name])
    return b"", False


class CardFile:
    """One card of our type in Metaflow's store of cards, as the command that makes it names it.

    This does what the command does (``card_cli.py:create``, 2.19.39), which would start a process for the page and another
    one for its data, each of which imports everything.
    """

    def __init__(self, flow_datastore: Any, given: Mapping[str, str]) -> None:
        from metaflow.plugins.cards.card_datastore import CardDatastore

        self._flow_datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        storage = copy(flow_datastore._storage_impl)
        storage.datastore_root = CardDatastore.get_storage_root(storage.TYPE) or storage.datastore_root
        self._where = given["create"]
        self.pathspec = f"{flow_datastore.flow_name}/{self._where}"
        store = SimpleNamespace(_storage_impl=storage, flow_name=flow_datastore.flow_name)
        self._store = CardDatastore(store, self.pathspec)
        self._uuid, self._options = given["--card-uuid"], {"card_id": given.get("--id")}

    def save(self, page: str, token: str) -> None:
        """Store the page; browsers load it anew when `token` is another one."""
        html = page.replace(MetaflowCard.RELOAD_POLICY_TOKEN, token)
        self._store.save_card(self._uuid, "torchrun", html, **self._options)

    def save_data(self, sections: Mapping[str, Any], token: str) -> None:
        """Store what a page that browsers show is renewed with."""
        fresh = {"reload_token": token, "data": sections, "created_on": time.time()}
        self._store.save_data(self._uuid, "torchrun", fresh, **self._options)

    def register(self, facts: str) -> None:
        """Register the card with the task's metadata; `facts` is JSON."""
        from metaflow.plugins.cards.metadata import _save_metadata

        attempt = current.retry_count
        _save_metadata(self._flow_datastore.metadata, *self._where.split("/"), attempt, self._uuid, json.loads(facts))


def take_control_task(step: str, is_control: Callable[[str], bool]) -> None:
    """Have ``card get RUN/STEP`` and its like show the control node's task; Metaflow takes the newest (2.19.39)."""
    from metaflow.plugins.cards import card_cli

    def find_control(find: Callable[..., Any], flow: str, pathspec: str) -> Any:
        task = find(flow, pathspec)
        is_step = pathspec.rpartition("/")[2] == step
        return next((each for each in task.parent if is_control(each.id)), task) if is_step else task

    card_cli.resolve_task_from_pathspec = partial(find_control, card_cli.resolve_task_from_pathspec)


# --- pages and components ---------------------------------------------------------------------------


def component_class() -> Any:
    """Return the base class for third-party components; without it, Metaflow warns that it can't show ours."""
    return known(f"{_COMPONENTS}:UserComponent", object)


def as_component(render: Any) -> Any:
    """Decorate a component's `render` like Metaflow's own: it has an id, and its error is shown in its place."""
    from metaflow.plugins.cards.card_modules.components import with_default_component_id
    from metaflow.plugins.cards.card_modules.renderer_tools import render_safely

    return with_default_component_id(render_safely(render))


def page(pathspec: str, layout: Any, style: str, is_final: bool) -> str:
    """Return a page in the frame of Metaflow's own cards (``card_modules/basic.py``)."""
    from metaflow.plugins.cards.card_modules import basic, chevron

    shown = {"metadata": {"pathspec": pathspec}, "components": [layout]}
    rendered: str = chevron.render(
        basic.read_file(basic.RENDER_TEMPLATE_PATH),
        {
            "task_data": base64.b64encode(json.dumps(shown).encode()).decode(),
            "javascript": basic.read_file(basic.JS_PATH),
            "css": basic.read_file(basic.CSS_PATH) + style,
            "title": pathspec,
            "card_data_id": uuid.uuid4(),
            "RENDER_COMPLETE": is_final,
        },
    )
    return rendered


def ui_url() -> str | None:
    """Return the URL of Metaflow's user interface, if there is one."""
    from metaflow.metaflow_config import UI_URL

    return UI_URL or None
