"""Makes the cards that show the gang: ``@card(type="torchrun")``, in this process, and a user's own cards with parts of it.

Without such a card, this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import cards
from ..compat.renamed import convenience
from ..gang.view import GangView
from ..show.gang_card import page_of_gang, sections_of_gang
from ..show.gang_part import GangPart
from .transfer import do_within

_LIVE, _LAST = "what the gang's card shows while the step runs", "the last card of a step that has failed"
_RUNS, _ENDED = "runtime", "final"  # what a browser that shows a page compares


class Cards:
    """The cards of one task; one thread at a time renews them.

    `shown` returns what they show, and is set by who knows.
    """

    def __init__(self, flow_datastore: Any) -> None:
        self.shown: Callable[[], GangView] = GangView
        self._flow_datastore = flow_datastore
        self._ours = [] if flow_datastore is None else cards.of_type("torchrun")
        self._has_page = False
        self._facts: dict[str, Any] = {}  # by the card's uuid, what is still to be registered
        cards.make_here(self._ours, flow_datastore, self._make)

    def part(self, names: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's page for a card of the user's own; called by the step's code."""
        return GangPart(names, lambda: self.shown())

    def renew(self) -> None:
        """Make all cards, as of a running task."""
        with convenience(_LIVE):
            for card in self._ours:
                if not self._has_page or self._facts:
                    cards.make(card, "render_runtime", is_final=False)
                cards.make(card, "refresh", is_final=False)
            self._has_page = bool(self._ours)
            for card in self._with_parts:
                cards.renew_users(card)

    @property
    def are_wanted(self) -> bool:
        """Whether there may be any."""
        return bool(self._ours or self._with_parts)

    @property
    def _with_parts(self) -> list[Any]:
        return cards.with_component(GangPart)

    def make_last(self, patience_s: float) -> None:
        """Make the last cards of a failing task, which Metaflow does not make; wait at most `patience_s`."""
        if self.are_wanted:
            do_within(self._make_last, patience_s)

    def _make_last(self) -> None:
        # Like Metaflow's `CardDecorator.task_finished` for a task that ended well. The final cards of Metaflow's own types
        # need such a task, so a user's card is rendered once more as that of a running task.
        self._has_page = False  # a step that has caught the error may launch again
        with convenience(_LAST):
            made = {"render": self._ours, "render_runtime": self._with_parts}
            for card, first in ((card, first) for first, found in made.items() for card in found):
                for mode in (first, "refresh"):
                    cards.make(card, mode, is_final=True)

    def _make(self, file: cards.CardFile, is_refresh: bool, is_last: bool) -> None:
        """Make a card of our type, in the place of Metaflow's process."""
        if file.facts is not None:  # once
            self._facts[file.uuid] = file.facts
        token = _ENDED if is_last else _RUNS
        if is_refresh:
            file.save_data(sections_of_gang(file.pathspec, self.shown()), token)
            return
        file.save(page_of_gang(file.pathspec, self.shown(), is_last), token)
        if facts := self._facts.get(file.uuid):
            file.register(facts)
            del self._facts[file.uuid]


def make_none() -> None:
    """Have this task make no card of our type; Metaflow makes its other cards."""
    cards.make_here(cards.of_type("torchrun"), None, lambda *_: None)
