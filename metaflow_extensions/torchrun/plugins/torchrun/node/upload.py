"""Uploads to the datastore after all workers of this node have ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..events import Event
from ..gang.cause import Cause, Failure
from ..gang.member import Member
from ..gang.protocol import Go, Save, Stored, Storing, Told
from ..launch.transfer import Transfer
from .generation import Generation
from .plan import Plan
from .services import ToStore


class Upload:
    """An upload, with what this node reports about it.

    The upload has a thread of its own, in `Transfer`. That thread puts this object into the launch's inbox whenever
    there is news; everything else here belongs to the thread that calls `Supervisor.run`.
    """

    def __init__(
        self, to_store: Mapping[str, ToStore], plan: Plan, about: Go | Save, member: Member, vital: bool
    ) -> None:
        assert plan.store is not None
        self._to_store = to_store  # by feature
        self._plan = plan
        self._about = (about.launch, about.generation)
        self._member = member
        steps = itertools.chain.from_iterable(each.steps() for each in to_store.values())
        self._transfer = Transfer(plan.store, "stores", steps)
        self.what = self._transfer.step.what
        self.is_vital = vital  # whether the launch fails without it

    def start(self) -> None:
        """Begin."""
        inbox = self._member.inbox  # this launch's; a later launch has another
        self._transfer.start(lambda: inbox.put(self))

    def give_up(self) -> None:
        """Abandon it: it sends and logs nothing more."""
        self._transfer.give_up()

    def poll(self, has_news: bool) -> bool:
        """Report to the log and the gang: another value, a slow upload, or the end. Return whether it has ended."""
        if self._transfer.over:
            self._tell_end()
            return True
        if (line := self._transfer.line()) is not None:
            self._note(line)
        if has_news or line is not None:
            self._member.send(Storing(*self._about, self._transfer.what()))
        return False

    def _tell_end(self) -> None:
        self.give_up()
        problem = self._transfer.problem()
        failures = () if problem is None or not self.is_vital else (Failure(self._cause(problem)),)
        for failure in failures:
            text = f"{failure.cause.who} {failure.cause.what}; stopping all nodes"
            self._member.emit(Event("worker_failed", self._member.node, text))
        for name, each in self._to_store.items():
            for line in () if failures else each.lines(problem, self._transfer.seconds):
                self._note(line)
            if (told := each.told()) is not None:
                self._member.send(Told(*self._about, name, told))
        self._member.send(Stored(*self._about, failures))

    def _note(self, text: str) -> None:
        self._member.emit(Event("note", self._member.node, text))

    def _cause(self, problem: str) -> Cause:
        step, member = self._transfer.step, self._member
        local_rank = None if step.rank is None else step.rank - self._plan.spec.ranks[0]
        text = f"has ended well, but {step.what} could not be stored in {self._transfer.where} {problem}"
        return Cause("store", member.node, member.host, step.rank, local_rank, exception=text)


class Uploads:
    """What this node stores of one launch: one upload at a time."""

    def __init__(self, plan: Plan, member: Member) -> None:
        self._plan, self._member = plan, member
        self._current: Upload | None = None

    def prepare(self, generation: Generation) -> str | None:
        """Make the upload that follows the end of `generation`; return what it stores first, or None for nothing."""
        ok, self._current = generation.ended_well, None
        if not (ok and generation.was_stopped) and (to_store := self._plan.services.to_store(ok)):
            self._current = Upload(to_store, self._plan, generation.go, self._member, vital=ok)
        return None if self._current is None else self._current.what

    def start(self) -> None:
        """Begin what was prepared."""
        if self._current is not None:
            self._current.start()

    def save(self, save: Save) -> None:
        """Store what is left of a launch that has failed for good."""
        self.give_up()
        if save.within_s is None:
            return
        to_store = self._plan.services.to_save(save.within_s)
        if not to_store:
            self._member.send(Stored(save.launch, save.generation))
            return
        self._current = Upload(to_store, self._plan, save, self._member, vital=False)
        text = f"storing {self._plan.services.saves}, for {save.within_s:g} s at most"
        self._member.emit(Event("note", self._member.node, text))
        self._current.start()

    def poll(self, news: Upload | None = None) -> None:
        """Poll the current upload. `news` is the upload that has some; it may have been given up since."""
        if self._current is not None and news in (None, self._current) and self._current.poll(news is not None):
            self._current = None

    def give_up(self, only_vital: bool = False) -> None:
        """Abandon the current upload; with `only_vital`, only one without which the launch fails."""
        if self._current is not None and (self._current.is_vital or not only_vital):
            self._current.give_up()
            self._current = None
