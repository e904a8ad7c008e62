"""What is wanted of this node's ranks, on its way to the datastore: values for other nodes, and outputs."""

from __future__ import annotations

from ..events import Event
from ..gang.cause import Cause, Failure
from ..gang.member import Member
from ..gang.protocol import Go, Save, Stored, StoredOutputs, Storing
from ..gang.texts import counted, size_text
from ..launch.output_pieces import OUTPUTS, OutputPieces
from ..launch.transfer import Transfer
from .plan import Plan


class Upload:
    """An upload, as this node tells of it.

    The upload has a thread of its own, in `Transfer`. That thread puts this object into the launch's inbox whenever
    there is news; everything else here belongs to the thread that calls `Supervisor.run`.
    """

    def __init__(
        self, transfer: Transfer, plan: Plan, about: Go | Save, member: Member, outputs: OutputPieces | None = None
    ) -> None:
        self._transfer = transfer
        self._plan = plan
        self._about = (about.launch, about.generation)
        self._member = member
        self._pieces = outputs
        self.outputs: StoredOutputs | None = None  # once they are stored
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
        keys = dict(self._transfer.results)
        self.outputs = keys.pop(OUTPUTS, None)
        if self._pieces is not None and problem is None:
            self._tell_outputs(self._pieces)
        elif self._pieces is not None and not self.is_vital:
            self._note(f"what outputs there are could not be stored in {self._transfer.where} {problem}")
        self._member.send(Stored(*self._about, keys, failures, self.outputs))

    def _tell_outputs(self, pieces: OutputPieces) -> None:
        for line in pieces.lines():
            self._note(line)
        if self.outputs is not None:
            stored = f"{counted(self.outputs.files, 'file')}, {size_text(self.outputs.size)}"
            self._note(f"stored outputs: {stored}, in {self._transfer.seconds:.1f} s")

    def _note(self, text: str) -> None:
        self._member.emit(Event("note", self._member.node, text))

    def _cause(self, problem: str) -> Cause:
        step, member = self._transfer.step, self._member
        local_rank = None if step.rank is None else step.rank - self._plan.ranks[0]
        text = f"has ended well, but {step.what} could not be stored in {self._transfer.where} {problem}"
        return Cause("store", member.node, member.host, step.rank, local_rank, exception=text)
