"""Private names of Metaflow's cards: ``metaflow/plugins/cards``, read in 2.13 and 2.19.39.

`import metaflow` loads this module, so imports are in the functions that need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

from metaflow import current

from .renamed import convenience, known

MetaflowCard: Any = known("metaflow.plugins.cards.card_modules.card:MetaflowCard", object)
UI_URL: str | None = known("metaflow.metaflow_config:UI_URL")  # of Metaflow's user interface
RELOAD_POLICY = getattr(MetaflowCard, "RELOAD_POLICY_ONCHANGE", "onchange")
Make: TypeAlias = "Callable[[CardFile, bool, bool], object]"
"""Makes a card of our type; gets whether only what is in it is to be renewed, and whether it is the last time."""


# --- the cards of a task; each is a `CardComponentManager` ------------------------------------------


def of_type(kind: str) -> list[Any]:
    """Return the task's cards of a type."""
    collector = current.get("card")
    return [] if collector is None else list(collector.get(kind))


def with_component(kind: type) -> list[Any]:
    """Return the task's cards that have a component of a class and can be renewed while the task runs."""
    collector = current.get("card")
    managers = [] if collector is None else list(collector._card_component_store.values())
    cards = [card for card in managers if card._card_creator_args["runtime_card"]]
    # The step's code may add components meanwhile, so iterate over a copy: `list` makes it in one go.
    return [card for card in cards if any(isinstance(each, kind) for each in list(card.components.values()))]


def renew_users(card: Any) -> None:
    """Renew a card of the user's own; its data, and the time before which Metaflow drops a refresh of the user's, stay."""
    before = card._last_refresh
    card.refresh(card._latest_user_data)  # Metaflow drops it while the process of the last one runs
    card._last_refresh = before


def make(card: Any, mode: str, is_final: bool) -> None:
    """Make a card; a final one of Metaflow's is waited for."""
    card._card_creator.create(**card._card_creator_args, mode=mode, final=is_final)


def make_here(cards: Sequence[Any], flow_datastore: Any, make_ours: Make) -> None:
    """Have cards of our type made by `make_ours`, in this process; Metaflow makes the others.

    One `CardCreator` serves all cards of a task.
    """
    for creator in {id(card._card_creator): card._card_creator for card in cards}.values():
        creator._run_cards_subprocess = partial(_make, creator._run_cards_subprocess, flow_datastore, make_ours)


def _make(start: Callable[..., None], flow_datastore: Any, make_ours: Make, *args: Any, **options: Any) -> None:
    uuid, name, mode, task, attributes, *_ = args
    if attributes["type"] != "torchrun":
        start(*args, **options)
        return
    with convenience("the gang's card"):
        facts = options["metadata_dict"] if options.get("save_metadata") else None  # from 2.19, and once
        pathspec = f"{current.flow_name}/{task}"
        make_ours(CardFile(flow_datastore, uuid, name, pathspec, facts), mode == "refresh", options["final"])


@dataclass
class CardFile:
    """One card of our type in Metaflow's store of cards.

    This does what Metaflow's command does (``card_cli.py:create``, 2.19.39), which would start a process for the page and
    another one for its data, each of which imports everything.
    """

    _flow_datastore: Any  # metaflow.datastore.FlowDataStore
    uuid: str
    _name: str | None
    pathspec: str  # the card's task
    facts: Any  # what is to be registered of it

    @property
    def _store(self) -> Any:
        from metaflow.plugins.cards.card_datastore import CardDatastore

        storage = copy(self._flow_datastore._storage_impl)
        storage.datastore_root = CardDatastore.get_storage_root(storage.TYPE) or storage.datastore_root
        store = SimpleNamespace(_storage_impl=storage, flow_name=self._flow_datastore.flow_name)
        return CardDatastore(store, self.pathspec)

    def save(self, page: str, token: str) -> None:
        """Store the page; browsers load it anew when `token` is another one."""
        html = page.replace(MetaflowCard.RELOAD_POLICY_TOKEN, token)
        self._store.save_card(self.uuid, "torchrun", html, card_id=self._name)

    def save_data(self, sections: Mapping[str, Any], token: str) -> None:
        """Store what a page that browsers show is renewed with."""
        fresh = {"reload_token": token, "data": sections, "created_on": time.time()}
        self._store.save_data(self.uuid, "torchrun", fresh, card_id=self._name)

    def register(self, facts: Any) -> None:
        """Register the card with the task's metadata."""
        from metaflow.plugins.cards.metadata import _save_metadata

        metadata, attempt = self._flow_datastore.metadata, current.retry_count
        _save_metadata(metadata, *self.pathspec.split("/")[1:], attempt, self.uuid, facts)


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
    return known("metaflow.plugins.cards.card_modules.components:UserComponent", object)


def as_component(render: Any) -> Any:
    """Decorate a component's `render` like Metaflow's own: it has an id, and its error is shown in its place."""
    from metaflow.plugins.cards.card_modules.components import with_default_component_id
    from metaflow.plugins.cards.card_modules.renderer_tools import render_safely

    return with_default_component_id(render_safely(render))


def page(pathspec: str, shown: Mapping[str, Any], style: str, is_final: bool) -> str:
    """Return a page as one of Metaflow's own cards, with a style besides."""
    from metaflow.plugins.cards.card_modules.basic import BlankCard

    card, task = BlankCard({"title": shown["title"]}), SimpleNamespace(pathspec=pathspec)
    page: str = card.render(task, shown["contents"], runtime=not is_final)
    return page.replace("</head>", f"<style>{style}</style></head>", 1)
