"""A feature's part on the control node: the data that it keeps. Pure.

The core hands each `Report` to the keeper of its feature, and asks all keepers for what is to be stored. It knows none of
them. A keeper that raises ends no launch: a line says so once, and its feature keeps silent from then on. Where it
raises at what one node tells, it hears no more of that node, and keeps what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..errors import TorchrunError
from .messages import Report
from .wire import finite

Plain: TypeAlias = dict[str, Any]
"""Data that JSON can hold."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Where:
    """Where a rank runs."""

    node: int
    rank: int
    host: str


@dataclass(frozen=True)
class Happened:
    """What a feature adds to the gang's records; all but `kind` are fields of `Record`."""

    kind: str
    node: int
    text: str
    rank: int | None = None
    exit_code: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Failing:
    """Why a keeper has the launch fail."""

    kind: str  # of the cause, and of the record
    text: str
    node: int | None = None  # whose fault it is; None: the launch as a whole fails
    advice: str = ""  # what to change


@dataclass(frozen=True)
class Remarks:
    """What a keeper has to say."""

    lines: tuple[str, ...] = ()  # for the control node's log
    happened: tuple[Happened, ...] = ()
    failing: Failing | None = None  # only of `tick`; the launch is stopped then
    ask: Plain | None = None  # goes to its watcher on each node whose workers run
    answer: Plain | None = None  # to what a command has asked; see `Keeper.request`


class Keeper:
    """What one feature keeps: of a bounded size, without a clock. All times are seconds since the gang's begin."""

    has_record = True  # whether the gang's record has a field for it, null where there is nothing yet

    @classmethod
    def of(cls, num_nodes: int) -> Keeper | None:
        """Return the keeper of a gang, if it needs one."""
        return cls()

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Take note that all workers of a launch start, or start again; `policy` is what its feature is to look after."""

    def handle(self, node: int, told: Report, at_s: float) -> Remarks | None:
        """Keep what a node tells; may raise where it does not fit. Return what there is to say of it."""

    def request(self, data: Plain, at_s: float) -> Remarks | None:
        """Start to find out what a command asks of the gang; the answer comes in `Remarks`, of this call or a later one."""
        return None

    def ended(self, node: int, ok: bool) -> Remarks | None:
        """Take note that all workers of a node have ended, or that it takes no part in this generation."""
        return None

    def gone(self, node: int) -> Remarks | None:
        """Take note that a node is no longer in the gang: it is lost, or its step has ended."""

    def tick(self, at_s: float, where: Callable[[int], Where]) -> Remarks:
        """Look at the clock, once a second while workers run; `where` takes a rank."""
        return Remarks()

    def overdue(self, at_s: float) -> Remarks | None:
        """Answer what a command has asked, if the time for it is over; called once a second, whatever the gang does."""

    def record(self) -> Plain | None:
        """Return what is to be stored of it now."""
        return None

    def find_out_s(self, kind: str) -> float:
        """Return how long the nodes may take to find out more before they stop for a cause of this kind."""
        return 0.0

    def detail(self, kind: str) -> str:
        """Return what is known besides of a cause of this kind, for its report."""
        return ""

    def besides(self) -> Plain:
        """Return further fields of the record, by names of their own."""
        return {}

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return what the control node, or each other node, gets to know at the end of a launch; see `Verdict.error`."""
        return {}


class Keepers:
    """The keepers of all features, by the features' names."""

    def __init__(self, keepers: Mapping[str, Keeper] | None = None) -> None:
        self._keepers = dict(keepers or {})
        self._counts = dict.fromkeys(self._keepers, 0)
        self._silent: set[tuple[str, int | None]] = set()  # of one node, or of all
        self._unread: set[str] = set()  # whose record could not be read, which was said
        self._remarks: deque[Remarks] = deque()
        self._asks: deque[tuple[str, Plain]] = deque()
        self._answers: dict[str, Plain] = {}  # by feature

    @classmethod
    def of(cls, classes: Mapping[str, type[Keeper]], num_nodes: int) -> Keepers:
        """Return the keepers of a gang."""
        keepers = {name: each.of(num_nodes) for name, each in classes.items()}
        return cls({name: keeper for name, keeper in keepers.items() if keeper is not None})

    @property
    def count(self) -> int:
        """How many messages have come."""
        return sum(self._counts.values())

    @property
    def heard(self) -> int:
        """Of how many features one has come."""
        return sum(map(bool, self._counts.values()))

    def begin(self, launch: int, policy: Mapping[str, Plain], at_s: float) -> None:
        """Tell all that the workers of a launch start; `policy` is that of each feature."""
        for name in self._keepers:
            own = policy.get(name, {})
            self._ask(name, lambda keeper, own=own: keeper.begin(launch, own, at_s))  # type: ignore[misc]

    def handle(self, node: int, told: Report, at_s: float) -> None:
        """Hand a message to the keeper of its feature; one that nobody keeps is dropped."""
        if told.kind in self._keepers:
            self._counts[told.kind] += 1
            self._remember(told.kind, self._ask(told.kind, lambda keeper: keeper.handle(node, told, at_s), node))

    def request(self, feature: str, data: Plain, at_s: float) -> None:
        """Hand what a command asks to the keeper of a feature; one that is not there answers at once that it is not."""
        if feature in self._keepers:
            self._remember(feature, self._ask(feature, lambda keeper: keeper.request(data, at_s)))
        else:
            self._answers[feature] = {"id": data.get("id"), "unknown": True}

    def ended(self, node: int, ok: bool) -> None:
        """Tell all that a node's workers have ended."""
        for name, remarks in self._ask_all(lambda keeper: keeper.ended(node, ok)).items():
            self._remember(name, remarks)

    def gone(self, node: int) -> None:
        """Tell all that a node is no longer in the gang."""
        for name, remarks in self._ask_all(lambda keeper: keeper.gone(node)).items():
            self._remember(name, remarks)

    def overdue(self, at_s: float) -> None:
        """Have all answer what is overdue."""
        for name, remarks in self._ask_all(lambda keeper: keeper.overdue(at_s)).items():
            self._remember(name, remarks)

    def tick(self, at_s: float, where: Callable[[int], Where]) -> None:
        """Have all look at the clock."""
        for name, remarks in self._ask_all(lambda keeper: keeper.tick(at_s, where)).items():
            self._remember(name, remarks)

    def record(self) -> Plain:
        """Return what is to be stored, by feature, and further fields."""
        having = [name for name, keeper in self._keepers.items() if keeper.has_record]
        kept = {name: self._read(name, lambda keeper: finite(keeper.record())) for name in having}
        besides = [self._read(name, lambda keeper: keeper.besides()) or {} for name in self._keepers]
        more = {name: value for fields in besides for name, value in fields.items()}
        return {**kept, **more}

    def find_out_s(self, kind: str) -> float:
        """Return how long the nodes may take to find out more before they stop for a cause of this kind."""
        return max(self._ask_all(lambda keeper: keeper.find_out_s(kind)).values(), default=0.0)

    def detail(self, kind: str) -> str:
        """Return what is known besides of a cause of this kind."""
        return "\n".join(filter(None, self._ask_all(lambda keeper: keeper.detail(kind)).values()))

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> dict[str, Plain]:
        """Return what the control node, or each other node, gets to know at the end of a launch, by feature."""
        told = self._ask_all(lambda keeper: keeper.verdict(launch, to_control, error))
        return {name: plain for name, plain in told.items() if plain}

    def pop_remarks(self) -> list[Remarks]:
        """Return what there is to say since the last time."""
        return [self._remarks.popleft() for _ in range(len(self._remarks))]

    def pop_asks(self) -> list[tuple[str, Plain]]:
        """Return what keepers ask their watchers since the last time, each with its feature."""
        return [self._asks.popleft() for _ in range(len(self._asks))]

    def pop_answer(self, feature: str) -> Plain | None:
        """Return the newest answer of a feature, once."""
        return self._answers.pop(feature, None)

    def _remember(self, name: str, remarks: Remarks | None) -> None:
        if remarks is not None:
            self._remarks.append(remarks)
            if remarks.ask is not None:
                self._asks.append((name, remarks.ask))
            if remarks.answer is not None:
                self._answers[name] = remarks.answer

    def _ask_all(self, ask: Callable[[Keeper], _T]) -> dict[str, _T]:
        answers = {name: self._ask(name, ask) for name in self._keepers}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _read(self, name: str, ask: Callable[[Keeper], _T]) -> _T | None:
        """Ask one keeper for its record; an exception costs that record alone, not its verdict."""
        if (name, None) in self._silent:
            return None
        try:
            return ask(self._keepers[name])
        except Exception as error:
            if name not in self._unread:
                self._unread.add(name)
                self._warn(f"the record of {name} could not be read", error)
            return None

    def _ask(self, name: str, ask: Callable[[Keeper], _T], node: int | None = None) -> _T | None:
        """Ask one keeper; after an exception it gets no more of this node's messages, or nothing more without a node."""
        if {(name, node), (name, None)} & self._silent:
            return None
        try:
            return ask(self._keepers[name])
        except Exception as error:
            self._silent.add((name, node))
            whose = "the nodes'" if node is None else f"node {node}'s"
            self._warn(f"nothing more is kept of {whose} {name}", error)
            return None

    def _warn(self, what: str, error: Exception) -> None:
        self._remarks.append(Remarks((f"warning: {what}: {type(error).__name__}: {error}",)))
