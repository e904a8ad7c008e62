"""One upload to the datastore, of what the workers of this node have left; in the task."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..events import Event
from ..gang.cause import Cause, Failure
from ..gang.messages import Report, Store, Stored
from ..launch.transfer import ToStore, Transfer, ValueStore
from .member import Member
from .services import Services


def begin_upload(
    about: Store, services: Services, store: ValueStore | None, first_rank: int, member: Member
) -> Upload | None:
    """Begin to store what *store* asks for; or report that there is nothing to store, and return None."""
    try:
        if to_store := services.to_store(about.error, about.within_s):
            assert store is not None
            return Upload(about, to_store, store, first_rank, member)
    except Exception as error:  # no more threads; a value's file is gone
        if about.error is None:
            raise
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        member.say(Event("note", member.node, f"nothing is stored of the launch: {reason}"))
    member.send(Stored(about.launch, about.generation))
    return None


class Upload:
    """What *store* asks for, with what this node reports about it.

    The upload has a thread of its own, in `Transfer`. Everything here belongs to the thread that calls `run`.
    """

    def __init__(
        self, about: Store, to_store: Mapping[str, ToStore], store: ValueStore, first_rank: int, member: Member
    ) -> None:
        self._about = (about.launch, about.generation)
        self._first_rank, self._member = first_rank, member
        self._is_vital = about.error is None  # whether the launch fails without it
        self._to_store = to_store  # by the kind of report, at least one
        steps = itertools.chain.from_iterable(each.steps() for each in to_store.values())
        self.transfer = Transfer(store, "stores", steps)
        self.transfer.start()

    def poll(self) -> bool:
        """Report to the log and the gang: that it is slow, or has ended. Return whether it has ended."""
        if self.transfer.over:
            self._tell_end()
            return True
        if (line := self.transfer.line()) is not None:
            self._note(line)
        return False

    def _tell_end(self) -> None:
        self.transfer.give_up()
        problem = self.transfer.problem()
        failures = () if problem is None or not self._is_vital else (Failure(self._cause(problem)),)
        for failure in failures:
            text = f"{failure.cause.who} {failure.cause.what}; stopping all nodes"
            self._member.say(Event("worker_failed", self._member.node, text))
        for name, each in self._to_store.items():
            for line in () if failures else each.lines(problem, self.transfer.seconds):
                self._note(line)
            if (told := each.told()) is not None:
                self._report(name, told)
        self._member.send(Stored(*self._about, failures))

    def _report(self, kind: str, data: dict[str, Any]) -> None:
        self._member.send(Report(kind, *self._about, data))

    def _note(self, text: str) -> None:
        self._member.say(Event("note", self._member.node, text))

    def _cause(self, problem: str) -> Cause:
        step, member = self.transfer.step, self._member
        local_rank = None if step.rank is None else step.rank - self._first_rank
        text = f"has ended well, but {step.what} could not be stored in {self.transfer.where} {problem}"
        return Cause("store", member.node, member.host, step.rank, local_rank, exception=text)
