"""A feature's part in the task: what a launch does because the user asked for it, such as storing outputs.

An error of a `Watcher` is only logged. An error of a service ends the launch, since the user asked for the service.
The thread that calls `run` calls everything here, except for the steps of a `ToStore`: the upload's thread runs those.
The supervisor gets `Services.told`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from ..compat.renamed import harmless
from ..errors import LaunchFailed, TorchrunError
from ..gang.wire import Plain
from ..machine.accelerators import Machine, Nproc
from ..settings import StepSettings
from .run_settings import RunSettings
from .spec import FunctionSpec, LaunchSpec
from .transfer import Step, ValueStore


@dataclass(frozen=True)
class RunCall:
    """One call of `run` on this node."""

    settings: RunSettings
    num_nodes: int
    node: int
    store: ValueStore | None  # None outside of a flow


class ToStore:
    """What one service stores in the datastore when all workers of the gang have ended."""

    def steps(self) -> Iterator[Step]:
        """Yield what is to be done; the transfer's thread asks for each step and does it, one after the other."""
        yield from ()

    def told(self) -> Plain | None:
        """Return the data for the gang at its end: what was stored by then."""
        return None

    def lines(self, problem: str | None, seconds: float) -> Iterable[str]:
        """Return the lines for this node's log at its end; `problem` is why not everything is stored."""
        return ()


class Service:
    """One feature's service in one launch on this node."""

    folder: str | None = None  # removed by the supervisor if the task is killed
    emptied: str | None = None  # a folder with files of workers, which is emptied before others start
    function: FunctionSpec | None = None  # what the workers call instead of a script
    stores = False  # whether it may have something to store, see `to_store`
    # Whether ranks that have trained without a process group are meant to.
    may_train_alone = False

    @property
    def policy(self) -> Plain:
        """What the gang is to look after in this launch."""
        return {}

    def begin(self, spec: LaunchSpec) -> None:
        """Begin a generation: forget what another one has stored."""

    def to_store(self, error: TorchrunError | None, within_s: float | None) -> ToStore | None:
        """Return what to store of a launch that ends well, or with `error`: then as much as fits into the time."""
        return None

    def result(self, told: Plain, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Return fields of `TorchrunResult`; `told` is what the verdict tells. Raises TransferFailed."""
        return {}

    def failed(self, error: TorchrunError, told: Plain) -> None:
        """Add data to the error with which the launch has ended."""

    def original(self, error: LaunchFailed, told: Plain) -> BaseException:
        """Return what `run` raises instead of `error`, or `error`."""
        return error

    def close(self) -> None:
        """Release everything that no result holds."""


class InTask:
    """What a feature does in the task."""

    def starts(self, settings: StepSettings, machine: Machine, requested: Nproc | None) -> Plain | None:
        """Return what its part in the supervisor needs to start the agents of a step faster than cold; most start none.

        `requested` is what the resources of a task amount to.
        """
        return None

    def service(self, call: RunCall) -> Service | None:
        """Return what it does for one call of `run`, if that asks for it; raises TorchrunConfigError."""
        return None


def starts_of(
    features: Mapping[str, InTask], settings: StepSettings, machine: Machine, requested: Nproc | None
) -> Plain | None:
    """Return what `node.watchers.spares_of` needs; None if no feature starts agents warm, or if it has failed."""
    with harmless():  # all starts are cold then
        for name, each in features.items():
            if (data := each.starts(settings, machine, requested)) is not None:
                return {"feature": name, "data": data}
    return None


class Services(AbstractContextManager["Services"]):
    """The services of one launch, by the features' names; closes them at its end."""

    def __init__(self, services: Mapping[str, Service] | None = None) -> None:
        self._services = dict(services or {})
        self._exit = ExitStack()
        for service in self._services.values():
            self._exit.callback(service.close)

    @classmethod
    def of(cls, features: Mapping[str, InTask], call: RunCall) -> Services:
        """Return the services that a call of `run` asks for."""
        with ExitStack() as made:  # a service that is refused closes the ones before it
            services = {}
            for name, feature in features.items():
                service = feature.service(call)
                if service is not None:
                    made.callback(service.close)
                    services[name] = service
            made.pop_all()
        return cls(services)

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def told(self) -> dict[str, Any]:
        """What the supervisor must know of them, as fields of `node.request.Request`."""
        services = self._services.values()
        return {
            "stores": any(service.stores for service in services),
            "may_train_alone": any(service.may_train_alone for service in services),
            "folders": tuple(service.folder for service in services if service.folder is not None),
            "emptied": tuple(service.emptied for service in services if service.emptied is not None),
        }

    @property
    def policies(self) -> dict[str, Plain]:
        """What the gang is to look after, by feature."""
        return {name: service.policy for name, service in self._services.items() if service.policy}

    @property
    def function(self) -> FunctionSpec | None:
        """What the workers call instead of a script."""
        return next((service.function for service in self._services.values() if service.function is not None), None)

    def begin(self, spec: LaunchSpec) -> None:
        """Begin a generation: forget what another one has stored."""
        for service in self._services.values():
            service.begin(spec)

    def to_store(self, error: TorchrunError | None, within_s: float | None) -> dict[str, ToStore]:
        """Return what is to be stored, by feature."""
        found = {name: service.to_store(error, within_s) for name, service in self._services.items()}
        return {name: each for name, each in found.items() if each is not None}

    def result(self, told: Mapping[str, Plain], say: Callable[[str], None]) -> dict[str, Any]:
        """Return the fields of the result; raises TransferFailed."""
        found = [service.result(told.get(name, {}), say) for name, service in self._services.items()]
        return {name: value for fields in found for name, value in fields.items()}

    def failed(self, error: TorchrunError, told: Mapping[str, Plain]) -> None:
        """Add data to the error with which the launch has ended."""
        for name, service in self._services.items():
            service.failed(error, told.get(name, {}))

    def original(self, error: LaunchFailed, told: Mapping[str, Plain]) -> BaseException:
        """Return what `run` raises."""
        found = (service.original(error, told.get(name, {})) for name, service in self._services.items())
        return next((each for each in found if each is not error), error)
