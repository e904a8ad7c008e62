"""The feature of functions as entrypoints: every rank calls one; its value or exception comes back to the task."""

from __future__ import annotations

from ...compat.current import current_for_workers
from ...errors import TorchrunConfigError, TorchrunError
from ...gang.cause import cause_of
from ...gang.keepers import Keeper, Plain
from ...gang.protocol import Told
from ...node.services import RunCall, Service
from ...node.watchers import Feature
from .call import FunctionCall


class Functions(Feature):
    """Functions as entrypoints."""

    name = "functions"

    def service(self, call: RunCall) -> Service | None:
        """Return the call, where the entrypoint is a function."""
        run = call.settings
        if not callable(run.entrypoint):
            if run.process_group or run.gather:
                said = f"process_group={run.process_group!r}" if run.process_group else f"gather={run.gather!r}"
                raise TorchrunConfigError(
                    f"run({said}) is for functions; a script makes its process group and stores its results itself."
                )
            return None
        for name, is_set in (("module", run.module), ("no-python", "no-python" in run.options)):
            if is_set:
                raise TorchrunConfigError(
                    f"{name} says how to run a script, but the entrypoint is a function; remove it."
                )
        store = call.store if call.num_nodes > 1 else None  # a gang of one has its values itself
        arguments, group = run.entrypoint_args, run.process_group
        return FunctionCall(run.entrypoint, arguments, group, run.gather, store, current_for_workers())

    def keeper(self, num_nodes: int) -> Keeper | None:
        """Return what keeps where values and exceptions are stored."""
        return FunctionKeeper()


class FunctionKeeper(Keeper):
    """Keeps the keys under which the ranks of the last launch have stored values and exceptions."""

    has_record = False

    def __init__(self) -> None:
        self._launch = -1
        self._keys: Plain = {}  # by rank

    def begin(self, launch: int, policy: Plain, at_s: float) -> None:
        """Forget what a generation before has stored."""
        self._launch, self._keys = launch, {}

    def handle(self, node: int, told: Told, at_s: float) -> None:
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
