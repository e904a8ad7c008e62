"""What a launch does besides, since the user asked for it: it carries a function's values, and stores outputs.

The thread that calls `run` calls everything here, except for the steps of a `ToStore`: the upload's thread runs those.
An error ends the launch. The supervisor gets `Services.told`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from ..compat.datastore import DatastoreValues
from ..errors import LaunchFailed, TorchrunError
from ..gang.cause import Cause, FailureText, failed
from ..gang.group import Group
from ..gang.view import as_dicts
from ..gang.wire import Plain
from ..result import TorchrunResult
from ..supervisor.call import Call, FunctionSpec, Outcome
from .function_call import FunctionCall
from .launch_outputs import LaunchOutputs
from .member import Member
from .run_settings import RunSettings
from .transfer import ToStore, TransferFailed


class Services(ExitStack):
    """The services of one launch on this node; closes them at its end."""

    def __init__(
        self,
        call: FunctionCall | None = None,
        outputs: LaunchOutputs | None = None,
        store: DatastoreValues | None = None,
    ) -> None:
        super().__init__()
        self._call, self._outputs = call, outputs
        self.where = "" if store is None else store.where  # the datastore's name and place
        self._all = {name: each for name, each in {"functions": call, "outputs": outputs}.items() if each is not None}
        if call is not None:
            self.callback(call.close)

    @classmethod
    def of(cls, run: RunSettings, num_nodes: int, node: int, store: DatastoreValues | None) -> Services:
        """Return the services that a call of `run` asks for; `store` is None outside of a flow."""
        outputs = LaunchOutputs.of(run, node, store)  # first: it holds nothing
        # A gang of one has its values itself.
        return cls(FunctionCall.of(run, store if num_nodes > 1 else None), outputs, store)

    @property
    def told(self) -> dict[str, Any]:
        """What the supervisor must know of them, as fields of `supervisor.call.Call`."""
        call, stores = self._call, any(service.stores for service in self._all.values())
        more = {} if call is None else {"folders": (call.folder,), "emptied": (call.emptied,)}
        return {"stores": stores, "may_train_alone": call is not None and call.may_train_alone, **more}

    @property
    def function(self) -> FunctionSpec | None:
        """What the workers call instead of a script."""
        return None if self._call is None else self._call.function

    def begin(self, call: Call) -> None:
        """Begin a generation: forget what another one has stored."""
        for service in self._all.values():
            service.begin(call)

    def to_store(self, error: TorchrunError | None, within_s: float | None) -> dict[str, ToStore]:
        """Return what is to be stored of a launch that ends well, or with `error`: then as much as fits into the time."""
        found = {name: service.to_store(error, within_s) for name, service in self._all.items()}
        return {name: each for name, each in found.items() if each is not None}

    def failed(self, error: TorchrunError, told: Mapping[str, Plain]) -> None:
        """Add data to the error with which the launch has ended."""
        if self._outputs is not None:
            self._outputs.failed(error, told.get("outputs", {}))

    def original(self, error: LaunchFailed, told: Mapping[str, Plain]) -> BaseException:
        """Return what `run` raises."""
        return error if self._call is None else self._call.original(error, told.get("functions", {}))

    def result(self, told: Mapping[str, Plain], say: Callable[[str], None]) -> dict[str, Any]:
        """Return fields of `TorchrunResult`; `told` is what the verdict tells. Raises TransferFailed."""
        fields = _metrics(told.get("progress", {}))
        for name, service in self._all.items():
            fields |= service.result(told.get(name, {}), say)
        return fields


def result_of(outcome: Outcome, call: Call, member: Member, services: Services) -> TorchrunResult[Any]:
    """Return the result on this node of a launch that has ended well. Raises LaunchFailed if a part can't be loaded."""
    verdict = outcome.verdict
    try:
        fields = services.result(verdict.left, member.note)
    except TransferFailed as error:
        cause = Cause("store", member.node, member.host, exception=f"has no result: {error}")
        after = f"\nThe workers of launch {verdict.launch} had ended well on all nodes."
        told = failed(LaunchFailed, FailureText(cause, after=after))
        told.events = as_dicts(verdict.events)
        services.failed(told, verdict.left)
        raise told from error
    return TorchrunResult(
        launch=verdict.launch,
        num_nodes=call.num_nodes,
        node_index=call.node_index,
        nodes=(call.group or Group(call.num_nodes)).nodes,
        nproc_per_node=call.nproc,
        world_size=call.world_size,
        command=outcome.command,
        restarts=list(outcome.restarts),
        duration_s=outcome.duration_s,
        exit_codes=dict(sorted(outcome.exit_codes.items())),
        events=tuple(as_dicts(verdict.events)),
        has_values="values" in fields,
        **fields,
    )


def _metrics(told: Plain) -> dict[str, Any]:
    """Return rank 0's last values, and their curves; what is no number came as None, since JSON has no NaN."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    last, history = told.get("last", {}), told.get("history", {})
    curves = {key: [(step, number(value)) for step, value in points] for key, points in history.items()}
    return {"metrics": {key: number(value) for key, value in last.items()}, "history": curves}
