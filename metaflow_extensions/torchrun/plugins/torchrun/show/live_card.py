"""Renews the cards that show the gang, while the task runs and at its end.

They are ``@card(type="torchrun")`` and a user's own cards with parts of the gang's (`GangPart`). A separate thread, which is
there when one is due, requests them from Metaflow, which starts a process each time. The workers, the gang and the step
never wait for these.
Without such a card, this module does nothing.

The step's code may also refresh a user's own card. So this module does not renew it while that code runs, and keeps the
data of the user's last refresh, and the time before which Metaflow drops another one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metaflow import current

from ..channel.background import NEVER, Pauses, Work
from ..compat import cards
from ..compat.renamed import convenience, harmless
from ..elements.model import Sentence
from ..errors import TorchrunConfigError
from ..machine import processes
from ..machine.detached import PROGRAM, Detached
from ..records.on_page import NO_PAGES, Pages
from ..records.snapshot import Snapshot
from .as_card import part, said
from .gang_card import final
from .page import Place, page_of, section_names
from .program import program

_BUSY_S = 1.0  # between two looks while Metaflow still makes a card
# Each process of Metaflow takes most of a second of a core. So a young step is shown at most every 5 s after news, and
# every 15 s if only numbers change. The pause grows with the step's age: to 90 s, which is less than 1 % of a core, or
# to 30 s after news.
_SHORTEST_S, _SHORTEST_QUIET_S = 5.0, 15.0
_LONGEST_S, _OF_AGE = 90.0, 0.1
_LONGEST_AFTER_NEWS_S, _OF_AGE_AFTER_NEWS = 30.0, 0.01
_SETTLE_S = 15.0  # the wait at the step's end for a renewal that has just started
_LAST_S = 60.0  # for the last card of a failed task: it takes some seconds, and more on a busy machine
_BUSY_LOAD = 2.0  # of each CPU, from which on a last card of Metaflow's takes long
_REAP_S = 1.0  # the first process of a system may need this long to reap a process
# No result and no error depends on a card, and no process may be left to make it.
_LIVE, _LAST = "what the gang's card shows while the step runs", "the last card of a step that has failed"


def pause_s(age_s: float, has_news: bool) -> float:
    """Return the pause between two renewals; `age_s` is the age of the gang.

    Numbers on the card change all the time. News are rare events, such as a restart.
    """
    if has_news:
        return max(_SHORTEST_S, min(_LONGEST_AFTER_NEWS_S, age_s * _OF_AGE_AFTER_NEWS))
    return max(_SHORTEST_QUIET_S, min(_LONGEST_S, age_s * _OF_AGE))


class GangPart(cards.component_class()):  # type: ignore[misc]  # Metaflow is not typed
    """Parts of the gang's page in a user's own card: shows the present state whenever Metaflow renders it."""

    REALTIME_UPDATABLE = True

    def __init__(
        self,
        names: tuple[str, ...],
        shown: Callable[[], Snapshot | Sentence],
        place: Callable[[], Place],
        pages: Pages = NO_PAGES,
    ) -> None:
        known = section_names(pages)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise TorchrunConfigError(
                f"current.torch.card knows no part {unknown[0]!r}. The parts are {', '.join(map(repr, known))}."
            )
        self._names = names
        self._shown = shown  # returns what to show, in any thread: the gang, or why not
        self._place, self._pages = place, pages

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the part always shows the present state."""

    @cards.as_component
    def render(self) -> dict[str, Any]:
        """Return the component as plain data, like Metaflow's own components."""
        shown = self._shown()
        if isinstance(shown, Sentence):
            return {**said(shown), "id": self.component_id}
        page = page_of(shown, self._place(), self._pages, is_short=True)
        return part(self.component_id, page, self._names)


class LiveCard:
    """The cards of one task, from the gang's start to its end.

    The step's thread creates it, requests parts and ends it; a thread of its own renews the cards. `begin` begins that work:
    `ControlClient.in_background`.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        count: Callable[[], int],
        begin: Callable[[str, Callable[[], Pauses]], Work],
        runs_own_code: Callable[[], bool] = lambda: False,
        with_ours: bool = True,
        pages: Pages = NO_PAGES,
        end: cards.End = lambda command, card_uuid: False,
    ) -> None:
        self._end = end  # makes last cards, see `LastCards`
        self._snapshot = snapshot  # returns the snapshot to show; any thread may call it
        self._pages = pages
        self._count = count  # a count that grows with news
        self._runs_own_code = runs_own_code  # whether the step's own code runs now
        self._cards = cards.of_type("torchrun") if with_ours else []
        self._is_off = False  # whether no card is made any more
        self._has_parts = False  # whether the step's code has requested parts
        self._began_at = time.monotonic()
        self._pid = os.getpid()
        self._shown, self._shown_at = -1, float("-inf")
        self._is_over = False
        self._begin = begin
        self._work: Work | None = None  # there from the first card that is to be renewed on
        if self._cards:
            self._begin_work()

    def _begin_work(self) -> None:
        if self._work is None and not self._is_over:
            self._work = self._begin("torchrun-card", self._renew_if_due)
            self._work.begin()

    def part(self, names: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's page for a card of the user's own; called by the step's code."""
        found = GangPart(names, self.for_part, this_task, self._pages)
        self.follow_parts()
        return found

    def follow_parts(self) -> None:
        """Also renew the user's own cards with parts."""
        self._has_parts = True
        self._begin_work()

    def for_part(self) -> Snapshot:
        """Return the present snapshot for a part; any thread may call this."""
        return self._snapshot() if self._is_over else self._now()

    def _now(self) -> Snapshot:
        return self._snapshot().at(time.monotonic() - self._began_at)

    # --- in the card's thread

    def _renew_if_due(self) -> Pauses:
        if self._is_over:
            return NEVER, NEVER
        with convenience(_LIVE):
            if self._is_due(time.monotonic()):
                others = cards.with_component(GangPart) if self._has_parts and not self._runs_own_code() else []
                if any(map(cards.is_busy, [*self._cards, *others])):
                    return _BUSY_S, _BUSY_S
                if self._cards or others:
                    self._renew(others)
        now = time.monotonic()
        # In the step's own code only news is shown, and none on the user's own cards.
        is_quiet = self._runs_own_code() and (self._shown >= 0 or not self._cards)
        news_s, any_s = (self._shown_at - now + pause_s(now - self._began_at, has_news) for has_news in (True, False))
        return max(_BUSY_S, news_s), NEVER if is_quiet else max(_BUSY_S, any_s if self._shown >= 0 else news_s)

    def _is_due(self, now: float) -> bool:
        has_news = self._count() != self._shown
        return now - self._shown_at > pause_s(now - self._began_at, has_news)

    def _renew(self, others: list[Any]) -> None:
        self._shown, self._shown_at = self._count(), time.monotonic()
        stored = self._now().stored() if self._cards else {}
        for card in self._cards:
            with convenience(_LIVE):
                cards.start_by(card, _start_detached, self._end)
                card.refresh(stored)
        for card in others:
            cards.start_by(card, _start_detached, self._end)
            if cards.renew_users(card):
                self._shown = -1  # the next renewal is due soon

    # --- at the end

    def give_up(self) -> bool:
        """Make no more cards, not even at the end; return whether the task has a card of our type."""
        had, self._cards, self._is_off = bool(self._cards), [], True
        self.settle()
        return had

    def settle(self) -> None:
        """Stop renewing the cards. Metaflow itself makes the last cards of a task that ends well (2.19).

        Safe to call more than once; no effect in a forked child.
        """
        if os.getpid() != self._pid or self._is_over:
            return
        self._is_over = True
        if self._work is not None:
            self._work.settle(_SETTLE_S)
        for card in self._cards:
            cards.give(card, self._snapshot().stored())

    def make_last(self, patience_s: float | None = None) -> None:
        """Make the last cards of a failing task, which Metaflow does not make; wait at most `patience_s`. Works once."""
        if os.getpid() != self._pid or self._is_off:
            return
        self.settle()
        self._is_off = True
        others = cards.with_component(GangPart) if self._has_parts else []
        # Like Metaflow's `CardDecorator.task_finished` for a task that ended well. The final cards of Metaflow's own types
        # need such a task, so a user's card is rendered once more as that of a running task.
        wanted = [(card, "render") for card in self._cards] + [(card, "render_runtime") for card in others]
        deadline = time.monotonic() + (_LAST_S if patience_s is None else patience_s)
        with convenience(_LAST):
            threads = [
                threading.Thread(target=_make_last, args=each, name="torchrun-lastcard", daemon=True) for each in wanted
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))


def pointing_at(control: str, pages: Pages) -> Callable[[tuple[str, ...]], GangPart]:
    """Return what makes parts for a user's own card on another node: they name `control`, as run, step and task."""
    parallel, task = current.parallel, f"{current.flow_name}/{control}"
    here = f"node {parallel.node_index} (host {socket.gethostname()}) of a gang of {parallel.num_nodes} nodes"
    sentence = Sentence(f"This is {here}. The card of node 0's task shows the gang: {task}.")
    return lambda names: GangPart(names, lambda: sentence, this_task, pages)


def this_task() -> Place:
    """Return the place of this task's gang, for its page."""
    flow, run, step, task = map(str, (current.flow_name, current.run_id, current.step_name, current.task_id))
    return Place(flow, run, step, task, ui_url=cards.ui_url(), program=program())


def _make_last(card: Any, first: str) -> None:
    with convenience(_LAST):
        while cards.is_busy(card):  # Metaflow would also wait, but without sleeping
            time.sleep(0.05)
        for mode in (first, "refresh"):
            cards.make_last(card, mode)


class LastCards:
    """Makes the last cards of a task: those of our type in this process, since others would take seconds to start."""

    def __init__(self, flow_datastore: Any, say: Callable[[str], object]) -> None:
        self._flow_datastore = flow_datastore  # metaflow.datastore.FlowDataStore
        self._say = say
        self._has_said = False

    def make(self, command: Sequence[str], card_uuid: str) -> bool:
        """Make a card whose command Metaflow would run and wait for; return False if Metaflow has to."""
        is_made = False
        with harmless():
            is_made = _end_renewal(card_uuid) and cards.save_final(self._flow_datastore, command, final)
        if not is_made and not self._has_said and os.getloadavg()[0] > _BUSY_LOAD * (os.cpu_count() or 1):
            self._has_said = True
            self._say("Metaflow makes the step's last cards; this machine is busy, so that may take a minute")
        return is_made


def _end_renewal(card_uuid: str) -> bool:
    """End a renewal that runs, which the last card would replace; return whether none runs any more."""
    process = cards.process_of(card_uuid)
    if process is None or process.poll() is not None:
        return True
    if not isinstance(process, _CardProcess):
        return False  # a child, for which Metaflow waits
    if cards.is_first(process.command):
        return process.wait(_SETTLE_S)
    process.kill()
    ended = process.wait(_SETTLE_S)
    cards.remove_inputs(process.command)
    return ended


class _CardProcess(Detached):
    """A process that makes a card, with the methods of `Popen` that Metaflow calls."""

    is_of_use = True  # for all instances; False if a parent was found that does not reap its dead processes
    command: Sequence[str] = ()
    _ended_at: float | None = None  # when its end was first noticed

    def poll(self) -> int | None:
        """Return 0 if it has ended, whatever its exit code; else None."""
        if not self.wait(0.0):
            return None
        self._ended_at = self._ended_at or time.monotonic()
        return 0

    @property
    def is_reaped(self) -> bool:
        """Whether its parent has reaped it, or had less than a second to do so."""
        is_new = self._ended_at is None or time.monotonic() < self._ended_at + _REAP_S
        return is_new or processes.began(self.pid) != self.began

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def _start_detached(command: Sequence[str], card_uuid: str, env: Mapping[str, str]) -> bool:
    """Start the process, unless another makes this card already; then Metaflow handles it. Return whether it started.

    It is no child of the task, since the step's code may wait for all its children.
    """
    process = cards.process_of(card_uuid)
    if process is not None and process.poll() is None:
        return False
    if isinstance(process, _CardProcess) and not process.is_reaped:
        # The process that has adopted it does not reap, for example a program that is a container's first process. Each
        # card would leave a dead process behind, so this way is not used again.
        _CardProcess.is_of_use = False
    if not _CardProcess.is_of_use:
        return False
    started = _CardProcess(PROGRAM, command, env, stderr=subprocess.DEVNULL)
    started.command = command
    cards.name_process(card_uuid, started)
    return True
