"""What the control node does for its gang while our code waits: it stores what is known, makes cards, answers commands.

All of it are jobs for the datastore. One runs at a time, in a thread that is there while it runs; values and outputs of a
launch come first. While the step's own code runs, nothing is done: pages then show how the last launch has ended.
Who may write the step's datastore may ask the gang; nobody else can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import GangError, TorchrunPreempted
from ..gang.messages import CONTROL
from ..gang.view import GangView, NodeView, Presence, Word, told_by_others
from ..registry import Registry, Replies, Reply, Request, Requests
from .cards import Cards
from .link import NEVER
from .member import Member
from .transfer import Transfer, do_within

_PATIENCE_S = 5.0  # for one writing, and for the last one
_EVERY_S = 10.0  # between two writings: numbers, such as the nodes' usage, change all the time
_LOOK_S = 2.0  # one request of an object store: 43 000 in a day cost two cents (S3, $0.0004 for 1 000)
# For the last cards of a failed task: Metaflow's take some seconds, and more on a busy machine. If the task is preempted, its
# machine is about to go.
_LAST_CARD_S, _PREEMPTED_CARD_S = 60.0, 2.0


class GangStore:
    """What is known of one gang, on its control node; without a `registry` only cards show it.

    `tasks` are those of all nodes, in order, each as run, step and task.
    """

    def __init__(self, member: Member, tasks: Sequence[str], cards: Cards, registry: Registry | None) -> None:
        self._member, self._tasks, self._cards, self._registry = member, tasks, cards, registry
        self._began_at = time.monotonic()
        self._view: GangView | None = None
        self._changes = 0  # how many of them are stored
        self._asked: int | None = None  # a question about news
        self._due_at = 0.0
        self._look_at = 0.0 if registry is not None else NEVER
        self._requests: dict[str, Request] = {}  # the last one of each kind that was looked at
        self._answers: dict[str, int] = {}  # by kind, the questions for their answers
        self._replies: dict[str, Reply] = {}
        cards.shown = self.present
        member.meanwhile, member.store_now = self._go_on, self.store_now

    # --- what is known ------------------------------------------------------------------------------

    @property
    def view(self) -> GangView:
        """All that was known last; if the supervisor is gone, it tells that, too."""
        num_nodes, link = self._member.num_nodes, self._member.link
        found = self._view or GangView(began=time.time(), nodes=[NodeView() for _ in range(num_nodes)])
        for node, task in zip(found.nodes, self._tasks, strict=False):
            node.task = task
        found.command = self._member.command
        if link.end is not None and link.last_words is None:
            found = told_by_others(found, [Word(str(link.gone()), time.time(), num_nodes)]) or found
        return found

    def present(self) -> GangView:
        """Return the same for this moment of a gang that runs."""
        return self.view.at(time.monotonic() - self._began_at)

    def in_state(self, *states: Presence) -> list[int]:
        """Return the nodes, besides the control node, that are in one of these states, or were at the gang's end."""
        link = self._member.link
        with suppress(GangError):
            known = link.call("states") if link.last_words is None else link.last_words["states"]
            return [node for node, name in enumerate(known) if node != CONTROL and Presence[name] in states]
        return []  # the supervisor is gone

    # --- while our code waits ----------------------------------------------------------------------

    @property
    def _is_wanted(self) -> bool:
        return self._registry is not None or self._cards.are_wanted

    def _go_on(self) -> None:
        """Go on with what is due."""
        now, member, link = time.monotonic(), self._member, self._member.link
        if not self._is_wanted or member.uploads or (member.job is not None and member.job.hangs):  # one at a time
            return
        if self._asked is not None:
            if link.has_answer(self._asked):
                self._see_news(link.pop_answer(self._asked))
        elif now >= self._due_at:
            self._asked = link.ask("news", self._changes)
        elif now >= self._look_at or any(map(link.has_answer, self._answers.values())):
            self._look_at = now + _LOOK_S
            self._begin(self._serve)

    def _see_news(self, news: Mapping[str, Any]) -> None:
        self._asked, self._due_at = None, time.monotonic() + _EVERY_S
        if news["view"] is not None:
            self._view, self._changes = GangView.read(news["view"]), news["changes"]
            self._begin(self._store)

    def _store(self) -> None:
        """Store all that is known; in the job's thread."""
        try:
            if self._registry is not None:
                self._registry.save_view(self.view)
        finally:
            self._cards.renew()

    def _begin(self, do: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # no more threads: the next time
            self._member.job = Transfer(lambda _: do(), self._member.link.wake, _PATIENCE_S)

    def _serve(self) -> None:
        """Store the answers to commands that have come, and hand the gang what others ask; in the job's thread."""
        link, registry = self._member.link, self._registry
        assert registry is not None
        for what in [what for what, number in self._answers.items() if link.has_answer(number)]:
            if (data := link.pop_answer(self._answers.pop(what))) is not None:
                self._replies[what] = Reply(self._requests[what], time.time(), data)
                registry.save(Replies(self._replies))
        for what, request in (registry.load(Requests) or Requests()).last.items():
            if what not in self._answers and request != self._requests.get(what):
                self._requests[what], self._answers[what] = request, link.ask("request", request.id, what, request.of)

    def store_now(self) -> None:
        """Store what is known now, within some seconds, or until this node must end."""
        if self._is_wanted:
            self._settle()  # what was asked before may know less
            self._due_at = 0.0
            self._settle()

    def _settle(self) -> None:
        member = self._member

        def is_over() -> bool:
            return member.must_end or (self._asked is None and not member.has_job and self._due_at > 0.0)

        member.link.wait(is_over, _PATIENCE_S)

    # --- the end -----------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Store the gang's end, within some seconds, and make the last cards of a task that has failed.

        The link is closed by then.
        """
        member, link = self._member, self._member.link
        if link.last_words is not None:
            self._view = GangView.read(link.last_words["view"])
        if member.job is not None:
            member.job.await_end()
        if self._registry is not None and (member.job is None or not member.job.hangs):
            do_within(partial(self._registry.save_view, self.view), _PATIENCE_S)
        if error is not None:
            self._cards.make_last(_PREEMPTED_CARD_S if isinstance(error, TorchrunPreempted) else _LAST_CARD_S)
