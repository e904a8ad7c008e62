"""Private names of Metaflow's cards: ``metaflow/plugins/cards``, read in 2.13 and 2.19.39.

No result and no error depends on a card. If Metaflow renames something, a card shows less, and the log has one line
about it. `import metaflow` loads this module, so slow imports are in the functions that need them.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from metaflow import current

from .renamed import convenience, harmless, known

LIVE, LAST = "what the gang's card shows while the step runs", "the last card of a step that has failed"
_COMPONENTS = "metaflow.plugins.cards.card_modules.components"
# Without this class Metaflow ignores our cards.
MetaflowCard: Any = known("metaflow.plugins.cards.card_modules.card", "MetaflowCard", object)
RELOAD_POLICY = getattr(MetaflowCard, "RELOAD_POLICY_ONCHANGE", "onchange")
Start = Callable[[Sequence[str], str, Mapping[str, str]], bool]


# --- the cards of a task; each is a `CardComponentManager` ------------------------------------------


def of_type(kind: str) -> list[Any]:
    """Return the task's cards of a type; an empty list if they can't be found."""
    with convenience(LIVE):
        collector = current.get("card")
        return [] if collector is None else list(collector.get(kind))
    return []


def with_component(kind: type) -> list[Any]:
    """Return the task's cards that have a component of a class and can be renewed while the task runs."""
    with convenience(LIVE):
        collector = current.get("card")
        managers = [] if collector is None else list(collector._card_component_store.values())
        return [card for card in managers if card._card_creator_args["runtime_card"] and _has(card, kind)]
    return []


def _has(card: Any, kind: type) -> bool:
    # The step's code may add components meanwhile, so iterate over a copy: `list` makes it in one go.
    return any(isinstance(component, kind) for component in list(card.components.values()))


def give(card: Any, data: dict[str, Any]) -> None:
    """Set the data of a card, as its `refresh` does, but don't make the card now."""
    with convenience(LIVE):
        # What `CardComponentManager.refresh` sets (component_serializer.py, 2.19.39).
        card._latest_user_data = data


def renew_users(card: Any) -> bool:
    """Renew a card of the user's own, as its `refresh` does, and return whether its page has changed.

    If it has, the caller must refresh the data next: only then does a browser load the new page. Metaflow would wait
    for that here. The data of the user's last refresh, and the time before which Metaflow drops another one, stay.
    """
    with convenience(LIVE):
        changed_at = card.components.layout_last_changed_on
        if card._last_layout_change == changed_at:
            card._card_proc("refresh")
            return False
        card._render_seq += 1
        card._last_render = time.time()
        card._card_proc("render_runtime")
        card._last_layout_change = changed_at
        return True
    return False


def make_last(card: Any, mode: str) -> None:
    """Make a card once more and wait for it, since Metaflow makes none at the end of a task that fails."""
    with convenience(LAST):
        card._card_creator.create(**card._card_creator_args, mode=mode, final=True)


# --- the processes that make cards -------------------------------------------------------------------


def is_busy(card: Any) -> bool:
    """Return whether the card's last process still runs. Then Metaflow would silently drop another refresh."""
    with convenience(LIVE):
        process = process_of(card._card_creator_args["card_uuid"])
        return process is not None and process.poll() is None
    return False


def process_of(card_uuid: str) -> Any:
    """Return the process that makes the card or made it last; Metaflow treats it as a `Popen`."""
    from metaflow.plugins.cards.card_creator import CardProcessManager

    process, _ = CardProcessManager._get_card_process(card_uuid)
    return process


def name_process(card_uuid: str, process: Any) -> None:
    """Register a process with Metaflow as the one that makes a card."""
    from metaflow.plugins.cards.card_creator import CardProcessManager

    CardProcessManager._register_card_process(card_uuid, process)


def start_by(card: Any, start: Start) -> None:
    """Make a card in the background by `start`, which gets command, uuid and environment.

    Metaflow itself makes it (`CardCreator._run_command`) if `start` returns False or fails, or if a private name that
    this or `name_process` uses is missing.
    """
    manager = known("metaflow.plugins.cards.card_creator", "CardProcessManager", None)
    creator: Any = getattr(card, "_card_creator", None)
    run = getattr(creator, "_run_command", None)
    if run is not None and hasattr(manager, "_register_card_process") and not isinstance(run, partial):
        creator._run_command = partial(_run_command, run, start)


def _run_command(
    run: Callable[..., tuple[bytes, bool]],
    start: Start,
    command: Sequence[str],
    card_uuid: str,
    env: Mapping[str, str],
    wait: bool = True,
    timeout: Any = None,
) -> tuple[bytes, bool]:
    is_started = False
    with harmless():  # another Metaflow, or no more processes. A user's refresh also comes here
        is_started = not wait and start(command, card_uuid, env)
    return (b"", False) if is_started else run(command, card_uuid, env, wait=wait, timeout=timeout)


# --- pages and components ---------------------------------------------------------------------------


def component_class() -> Any:
    """Return the base class for third-party components; without it, Metaflow warns that it can't show ours."""
    return known(_COMPONENTS, "UserComponent", object)


def as_component(render: Any) -> Any:
    """Decorate a component's `render` like Metaflow's own: it has an id, and its error is shown in its place."""
    safely = known("metaflow.plugins.cards.card_modules.renderer_tools", "render_safely", _as_it_is)
    return known(_COMPONENTS, "with_default_component_id", _as_it_is)(safely(render))


def _as_it_is(render: Any) -> Any:
    return render


def page(pathspec: str, layout: Any, style: str, is_final: bool) -> str:
    """Return a page in the frame of Metaflow's own cards (``card_modules/basic.py``).

    If a name of that is missing, Metaflow shows the error instead of the card.
    """
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
    return known("metaflow.metaflow_config", "UI_URL", None) or None
