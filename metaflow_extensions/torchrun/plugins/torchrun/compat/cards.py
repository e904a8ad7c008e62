"""Private names of Metaflow's cards: ``metaflow/plugins/cards``, read in 2.13 and 2.19.39.

`import metaflow` loads this module, so imports are in the functions that need them.
"""

from __future__ import annotations

import base64
import json
import os
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

from .renamed import harmless, known

_COMPONENTS = "metaflow.plugins.cards.card_modules.components"
MetaflowCard: Any = known("metaflow.plugins.cards.card_modules.card:MetaflowCard", object)
RELOAD_POLICY = getattr(MetaflowCard, "RELOAD_POLICY_ONCHANGE", "onchange")
Start = Callable[[Sequence[str], str, Mapping[str, str]], bool]
End = Callable[[Sequence[str], str], bool]


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


def give(card: Any, data: dict[str, Any]) -> None:
    """Set the data of a card, as its `refresh` does, but don't make the card now."""
    # What `CardComponentManager.refresh` sets (component_serializer.py, 2.19.39).
    card._latest_user_data = data


def renew_users(card: Any) -> bool:
    """Renew a card of the user's own, as its `refresh` does, and return whether its page has changed.

    If it has, the caller must refresh the data next: only then does a browser load the new page. Metaflow would wait
    for that here. The data of the user's last refresh, and the time before which Metaflow drops another one, stay.
    """
    changed_at = card.components.layout_last_changed_on
    if card._last_layout_change == changed_at:
        card._card_proc("refresh")
        return False
    card._render_seq += 1
    card._last_render = time.time()
    card._card_proc("render_runtime")
    card._last_layout_change = changed_at
    return True


def make_last(card: Any, mode: str) -> None:
    """Make a card once more and wait for it, since Metaflow makes none at the end of a task that fails."""
    card._card_creator.create(**card._card_creator_args, mode=mode, final=True)


# --- the processes that make cards -------------------------------------------------------------------


def is_busy(card: Any) -> bool:
    """Return whether the card's last process still runs. Then Metaflow would silently drop another refresh."""
    process = process_of(card._card_creator_args["card_uuid"])
    return process is not None and process.poll() is None


def process_of(card_uuid: str) -> Any:
    """Return the process that makes the card or made it last; Metaflow treats it as a `Popen`."""
    from metaflow.plugins.cards.card_creator import CardProcessManager

    process, _ = CardProcessManager._get_card_process(card_uuid)
    return process


def name_process(card_uuid: str, process: Any) -> None:
    """Register a process with Metaflow as the one that makes a card."""
    from metaflow.plugins.cards.card_creator import CardProcessManager

    CardProcessManager._register_card_process(card_uuid, process)


def start_by(card: Any, start: Start, end: End = lambda command, card_uuid: False) -> None:
    """Make a task's cards in the background by `start`, which gets command, uuid and environment; the last ones by `end`.

    Metaflow itself makes a card (`CardCreator._run_command`) if the function returns False or fails.
    """
    creator = card._card_creator
    if not isinstance(creator._run_command, partial):
        creator._run_command = partial(_run_command, creator._run_command, start, end)


def _run_command(
    run: Callable[..., tuple[bytes, bool]],
    start: Start,
    end: End,
    command: Sequence[str],
    card_uuid: str,
    env: Mapping[str, str],
    wait: bool = True,
    timeout: Any = None,
) -> tuple[bytes, bool]:
    is_started = False
    with harmless():  # no more processes can be started. A user's refresh also comes here
        is_started = end(command, card_uuid) if wait else start(command, card_uuid, env)
    return (b"", False) if is_started else run(command, card_uuid, env, wait=wait, timeout=timeout)


def make_none() -> None:
    """Have this task make no card of our type; Metaflow makes its other cards."""
    for creator in [card._card_creator for card in of_type("torchrun")]:
        creator.create = partial(
            lambda make, **card: card["decorator_attributes"]["type"] == "torchrun" or make(**card), creator.create
        )


def take_control_task(step: str, is_control: Callable[[str], bool]) -> None:
    """Have ``card get RUN/STEP`` and its like show the control node's task; Metaflow takes the newest (2.19.39)."""
    from metaflow.plugins.cards import card_cli

    def find_control(find: Callable[..., Any], flow: str, pathspec: str) -> Any:
        task = find(flow, pathspec)
        is_step = pathspec.rpartition("/")[2] == step
        return next((each for each in task.parent if is_control(each.id)), task) if is_step else task

    card_cli.resolve_task_from_pathspec = partial(find_control, card_cli.resolve_task_from_pathspec)


# What `save_final` can't do: register the first card of a task, and show what else a card may have.
_NOT_HERE = ("--save-metadata", "--component-file", "--options")


def save_final(flow_datastore: Any, command: Sequence[str], make: Callable[[str, Any, bool], Any]) -> bool:
    """Make the last card of our type in this process; return False if Metaflow's command has to.

    Metaflow starts a process for the page and another one for its data, each of which imports everything: on a busy machine
    that took most of the time from the end of a step to that of its task. This does what they do (``card_cli.py:create``,
    2.19.39). `make` gets the task, the card's own data, and whether the page is wanted.
    """
    given = dict(pairwise(command))
    if given.get("--type") != "torchrun" or any(name in given for name in _NOT_HERE):
        return False
    with open(given["--data-file"], encoding="utf-8") as file:
        data = json.load(file)
    if data["render_seq"] != "final" or not data["user"]:
        return False
    from metaflow.plugins.cards.card_datastore import CardDatastore

    storage = copy(flow_datastore._storage_impl)
    storage.datastore_root = CardDatastore.get_storage_root(storage.TYPE) or storage.datastore_root
    flow, is_page = flow_datastore.flow_name, given["--mode"] == "render"
    pathspec = f"{flow}/{given['create']}"
    made = make(pathspec, data["user"], is_page)
    store = CardDatastore(SimpleNamespace(_storage_impl=storage, flow_name=flow), pathspec)
    name = given["--card-uuid"], "torchrun"
    if is_page:
        store.save_card(*name, made.replace(MetaflowCard.RELOAD_POLICY_TOKEN, "final"), card_id=given.get("--id"))
    else:
        fresh = {"reload_token": "final", "data": made, "created_on": time.time()}
        store.save_data(*name, fresh, card_id=given.get("--id"))
    remove_inputs(command)
    return True


def is_first(command: Sequence[str]) -> bool:
    """Return whether a command that makes a card also registers it, which no later one does."""
    return "--save-metadata" in command


def remove_inputs(command: Sequence[str]) -> None:
    """Remove the files that Metaflow has written for a command that is not run to its end."""
    given = dict(pairwise(command))
    for name in ("--data-file", "--component-file"):
        if name in given:
            with suppress(OSError):
                os.remove(given[name])


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
