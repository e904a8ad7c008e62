"""Keeps the gang's card up to date, ``@card(type="torchrun")``, while the control node's task runs and at its end.

A thread of its own asks Metaflow for it, which starts a process each time; the workers, the gang and the step never
wait for either. Without such a card nothing of this happens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from metaflow import current
from metaflow.plugins.cards.card_creator import CardProcessManager

_TYPE = "torchrun"  # of the card
_LOOKS_EVERY_S = 0.5
# A process of Metaflow's takes most of a second of a core. So a young step shows it at most every 5 s; the pause grows
# with the step's age to 90 s, which is less than 1 % of a core. After something has happened it grows to 30 s only.
_SHORTEST_S = 5.0
_LONGEST_S, _OF_AGE = 90.0, 0.1
_LONGEST_AFTER_NEWS_S, _OF_AGE_AFTER_NEWS = 30.0, 0.01
# How long a failed task waits for its last card.
_LAST_S = 15.0


def pause_s(age_s: float, has_news: bool) -> float:
    """Return how long after one renewal the next one is due; `age_s` is how long the gang has been there.

    Numbers on the card change all the time. News is what happens seldom, such as a restart.
    """
    if has_news:
        return min(_LONGEST_AFTER_NEWS_S, max(_SHORTEST_S, age_s * _OF_AGE_AFTER_NEWS))
    return min(_LONGEST_S, max(_SHORTEST_S, age_s * _OF_AGE))


def cards() -> list[Any]:
    """Return the task's cards of our type, each Metaflow's `CardComponentManager` (2.19)."""
    collector = current.get("card")
    return [] if collector is None else list(collector.get(_TYPE))


def point_at_control(node: int, control: str) -> None:
    """Let the card of another node's task say where the gang's is; `control` is run, step and task."""
    for card in cards():
        _give(card, {"node": node, "control": control})


def _give(card: Any, data: dict[str, Any]) -> None:
    """Set what the card is made of, as `CardComponentManager.refresh` does, but make none now (2.19)."""
    card._latest_user_data = data


class LiveCard:
    """The gang's card, from the gang's begin to its end."""

    def __init__(self, content: Callable[[], dict[str, Any]], count: Callable[[], int]) -> None:
        self._content = content  # what to show now; any thread may ask
        self._count = count  # how many things have happened
        self._cards = cards()
        self._began_at = time.monotonic()
        self._pid = os.getpid()
        self._shown, self._shown_at = -1, float("-inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchrun-card", daemon=True)
        if self._cards:
            self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_LOOKS_EVERY_S):
            if self._is_due(time.monotonic()) and not any(map(_is_busy, self._cards)):
                self._shown, self._shown_at = self._count(), time.monotonic()
                content = {**self._content(), "now_s": time.monotonic() - self._began_at}
                for card in self._cards:
                    with suppress(Exception):  # whatever a card's process can't do must not end the thread
                        card.refresh(content)

    def _is_due(self, now: float) -> bool:
        return now - self._shown_at > pause_s(now - self._began_at, self._count() != self._shown)

    def settle(self) -> None:
        """Follow the gang no further: Metaflow makes the last card of a task that ends well by itself (2.19).

        Can be repeated, and has no effect in a forked child.
        """
        if os.getpid() != self._pid or self._over.is_set() or not self._cards:
            return
        self._over.set()
        self._thread.join(_LAST_S)
        for card in self._cards:
            _give(card, self._content())

    def make_last(self, patience_s: float = _LAST_S) -> None:
        """Make the last card of a task that fails, which Metaflow would not, and wait so long for it; only once."""
        if os.getpid() != self._pid or not self._cards:
            return
        self.settle()
        cards, self._cards = self._cards, []
        last = threading.Thread(target=_make_last, args=(cards,), name="torchrun-lastcard", daemon=True)
        last.start()
        last.join(patience_s)


def _make_last(cards: list[Any]) -> None:
    for card in cards:
        while _is_busy(card):  # Metaflow would wait, too, but without sleeping
            time.sleep(0.05)
        for mode in ("render", "refresh"):  # as `CardDecorator.task_finished` does for a task that ended well
            with suppress(Exception):
                card._card_creator.create(**card._card_creator_args, mode=mode, final=True)


def _is_busy(card: Any) -> bool:
    """Tell whether the card's last process still runs: Metaflow would drop another refresh without a word (2.19)."""
    process, _ = CardProcessManager._get_card_process(card._card_creator_args["card_uuid"])
    return process is not None and process.poll() is None
