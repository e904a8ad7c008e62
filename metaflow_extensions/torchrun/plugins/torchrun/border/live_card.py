"""Keeps the cards that show the gang up to date while the task runs, and at its end.

They are ``@card(type="torchrun")`` and a user's own cards with parts of the gang's (`GangPart`). A thread of its own
asks Metaflow for them, which starts a process each time; the workers, the gang and the step never wait for either.
Without such a card nothing of this happens.

A user's own card is also the user's to refresh. So it is left alone while the step's own code runs, and what Metaflow
keeps of the user's last refresh stays as it is: its data, and the time before which another one is dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from metaflow import current
from metaflow.metaflow_config import UI_URL
from metaflow.plugins.cards.card_creator import CardProcessManager

from ..card.part import GangPart

_TYPE = "torchrun"  # of the card
_LOOKS_EVERY_S = 1.0
# A process of Metaflow's takes most of a second of a core. So a young step shows it at most every 5 s; the pause grows
# with the step's age to 90 s, which is less than 1 % of a core. After something has happened it grows to 30 s only.
_SHORTEST_S = 5.0
_LONGEST_S, _OF_AGE = 90.0, 0.1
_LONGEST_AFTER_NEWS_S, _OF_AGE_AFTER_NEWS = 30.0, 0.01
_OF_ALL_PER_S, _OF_ONE_MACHINE_PER_S = 2.0, 0.1
# How long a failed task waits for its last card.
_LAST_S = 15.0


def pause_s(age_s: float, has_news: bool, shortest_s: float) -> float:
    """Return how long after one renewal the next one is due; `age_s` is how long the gang has been there.

    Numbers on the card change all the time. News is what happens seldom, such as a restart.
    """
    longest_s, of_age = (_LONGEST_AFTER_NEWS_S, _OF_AGE_AFTER_NEWS) if has_news else (_LONGEST_S, _OF_AGE)
    return max(shortest_s, min(longest_s, age_s * of_age))


def pause_of_member_s(num_nodes: int, is_local: bool) -> float:
    """Return the shortest pause on a node that is not the control node.

    Each renewal asks Metaflow's service of the task, so those of all nodes together come twice a second at most. Nodes
    of one machine share its cores with the workers of all, so theirs come once in ten seconds.
    """
    return max(_SHORTEST_S, num_nodes / (_OF_ONE_MACHINE_PER_S if is_local else _OF_ALL_PER_S))


def cards() -> list[Any]:
    """Return the task's cards of our type, each Metaflow's `CardComponentManager` (2.19)."""
    collector = current.get("card")
    return [] if collector is None else list(collector.get(_TYPE))


def users_cards() -> list[Any]:
    """Return the task's other cards that show a part of the gang and can be renewed while the task runs (2.19)."""
    collector = current.get("card")
    managers = list(getattr(collector, "_card_component_store", {}).values())
    return [card for card in managers if card._card_creator_args["runtime_card"] and _has_part(card)]


def _has_part(card: Any) -> bool:
    # The step's code may add components meanwhile; a copy is made in one go.
    return any(isinstance(component, GangPart) for component in list(card.components.values()))


def _give(card: Any, data: dict[str, Any]) -> None:
    """Set what the card is made of, as `CardComponentManager.refresh` does, but make none now (2.19)."""
    card._latest_user_data = data


class LiveCard:
    """The cards of one task, from the gang's begin to its end."""

    def __init__(
        self,
        content: Callable[[], dict[str, Any]],
        count: Callable[[], int],
        runs_own_code: Callable[[], bool] = lambda: False,
        shortest_pause_s: float | None = None,
        with_ours: bool = True,
    ) -> None:
        self._content = content  # what to show now; any thread may ask
        self._count = count  # how many things have happened
        self._runs_own_code = runs_own_code  # whether the step's own code runs now
        self._shortest_pause_s = _SHORTEST_S if shortest_pause_s is None else shortest_pause_s
        self._cards = cards() if with_ours else []  # of our type
        self._is_off = False  # whether none is made
        self._has_parts = False  # whether the step's code has asked for any
        self._began_at = time.monotonic()
        self._pid = os.getpid()
        self._shown, self._shown_at = -1, float("-inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchrun-card", daemon=True)
        if self._cards:
            self._thread.start()

    def part(self, names: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's page for a card of the user's own; called by the step's code."""
        found = GangPart(names, self.for_part)
        self.follow_parts()
        return found

    def follow_parts(self) -> None:
        """Renew the cards of the user's own, too, that show parts."""
        self._has_parts = True
        if not (self._thread.is_alive() or self._over.is_set()):
            self._thread.start()

    def for_part(self) -> dict[str, Any]:
        """Return what a part shows now; any thread may ask."""
        content = self._content() if self._over.is_set() else self._now()
        return with_task(content)

    def _now(self) -> dict[str, Any]:
        return {**self._content(), "now_s": time.monotonic() - self._began_at}

    def _run(self) -> None:
        while not self._over.wait(_LOOKS_EVERY_S):
            if self._is_due(time.monotonic()):
                others = users_cards() if self._has_parts and not self._runs_own_code() else []
                if not any(map(_is_busy, [*self._cards, *others])):
                    self._renew(others)

    def _renew(self, others: list[Any]) -> None:
        self._shown, self._shown_at = self._count(), time.monotonic()
        content = self._now() if self._cards else {}
        for card in self._cards:
            with suppress(Exception):  # whatever a card's process can't do must not end the thread
                card.refresh(content)
        for card in others:
            with suppress(Exception):
                if _renew_users(card):
                    self._shown = -1  # the next renewal is due soon

    def _is_due(self, now: float) -> bool:
        has_news = self._count() != self._shown
        return now - self._shown_at > pause_s(now - self._began_at, has_news, self._shortest_pause_s)

    def give_up(self) -> bool:
        """Make no card, neither now nor at the end; tell whether there would be any of our type."""
        had, self._cards, self._is_off = bool(self._cards), [], True
        self.settle()
        return had

    def settle(self) -> None:
        """Follow the gang no further: Metaflow makes the last cards of a task that ends well by itself (2.19).

        Can be repeated, and has no effect in a forked child.
        """
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)
        for card in self._cards:
            _give(card, self._content())

    def make_last(self, patience_s: float = _LAST_S) -> None:
        """Make the last cards of a task that fails, which Metaflow would not, and wait so long for it; only once."""
        if os.getpid() != self._pid or self._is_off:
            return
        self.settle()
        own, self._cards = self._cards, []
        others, self._has_parts = users_cards() if self._has_parts else [], False
        # As for a task that ended well, Metaflow's `CardDecorator.task_finished`. Metaflow's own types can be made for
        # such a task alone, so a user's card is made once more as that of a task that runs.
        wanted = [(card, "render") for card in own] + [(card, "render_runtime") for card in others]
        threads = [
            threading.Thread(target=_make_last, args=each, name="torchrun-lastcard", daemon=True) for each in wanted
        ]
        deadline = time.monotonic() + patience_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def with_task(content: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be shown with the name of this task."""
    pathspec = f"{current.flow_name}/{current.run_id}/{current.step_name}/{current.task_id}"
    return {**content, "task": pathspec, "ui_url": UI_URL or None}


def _renew_users(card: Any) -> bool:
    """Renew a card of the user's own, as its `refresh` would (2.19), and return whether its page is another one now.

    Then the data has to follow, which tells a browser to load the page; Metaflow would wait for it here.
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


def _make_last(card: Any, first: str) -> None:
    while _is_busy(card):  # Metaflow would wait, too, but without sleeping
        time.sleep(0.05)
    for mode in (first, "refresh"):
        with suppress(Exception):
            card._card_creator.create(**card._card_creator_args, mode=mode, final=True)


def _is_busy(card: Any) -> bool:
    """Tell whether the card's last process still runs: Metaflow would drop another refresh without a word (2.19)."""
    process, _ = CardProcessManager._get_card_process(card._card_creator_args["card_uuid"])
    return process is not None and process.poll() is None
