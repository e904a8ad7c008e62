"""Keeps, on the control node, where the values and exceptions of a function are stored."""

from __future__ import annotations

from ...errors import TorchrunError
from ...gang.cause import cause_of
from ...gang.keepers import Keeper, Plain
from ...gang.messages import Report


class FunctionKeeper(Keeper):
    """Keeps the keys under which the ranks of the last launch have stored values and exceptions."""

    has_record = False

    def __init__(self) -> None:
        self._launch = -1
        self._keys: Plain = {}  # by rank

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget what a generation before has stored."""
        self._launch, self._keys = launch, {}

    def handle(self, node: int, told: Report, at_s: float) -> None:
        """Keep the keys of a node's ranks."""
        self._keys.update(told.data)

    def verdict(self, launch: int, to_control: bool, error: TorchrunError | None) -> Plain:
        """Return, by rank, the key of what the cause has raised or, for the control node, of all returned values."""
        if launch != self._launch:
            return {}
        if error is None:
            return dict(self._keys) if to_control else {}
        cause = cause_of(error)
        rank = "" if cause is None else str(cause.rank)
        return {rank: self._keys[rank]} if rank in self._keys else {}


PART = FunctionKeeper
