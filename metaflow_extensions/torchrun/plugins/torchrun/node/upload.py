"""What other nodes need of this node's ranks, on its way to the datastore after the end of a generation."""

from __future__ import annotations

from ..events import Event
from ..gang.cause import Cause, Failure
from ..gang.member import Member
from ..gang.protocol import Go, Stored, Storing
from ..launch.transfer import Transfer
from .plan import Plan


class Upload:
    """An upload, as this node tells of it.

    The upload has a thread of its own, in `Transfer`. That thread puts this object into the launch's inbox whenever
    there is news; everything else here belongs to the thread that calls `Supervisor.run`.
    """

    def __init__(self, transfer: Transfer, plan: Plan, go: Go, member: Member) -> None:
        self._transfer = transfer
        self._plan = plan
        self._about = (go.launch, go.generation)
        self._member = member
        self.what = transfer.step.what
        self.is_vital = transfer.vital

    def start(self) -> None:
        """Begin."""
        inbox = self._member.inbox  # this launch's; a later launch has another
        self._transfer.start(lambda: inbox.put(self))

    def give_up(self) -> None:
        """Leave it to itself; nothing more is told of it."""
        self._transfer.give_up()

    def look(self, has_news: bool) -> bool:
        """Tell the log and the gang of another value, of what takes long, or of the end; return whether it has ended."""
        if self._transfer.over:
            self._tell_end()
            return True
        if (line := self._transfer.line()) is not None:
            self._member.emit(Event("note", self._member.node, line))
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
        self._member.send(Stored(*self._about, dict(self._transfer.results), failures))

    def _cause(self, problem: str) -> Cause:
        step, member = self._transfer.step, self._member
        rank = step.rank or 0
        text = f"has ended well, but {step.what} could not be stored in {self._transfer.where} {problem}"
        return Cause("store", member.node, member.host, rank, rank - self._plan.ranks[0], exception=text)
