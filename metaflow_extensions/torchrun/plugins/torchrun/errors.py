"""The exceptions a user can meet.

::

    TorchrunError                  catch this one
    ├── TorchrunConfigError        an attribute or argument is wrong; nothing was started
    ├── EntrypointError            no entrypoint was given, or it does not exist
    ├── TorchNotFoundError         PyTorch is not installed where the step runs
    ├── GangError                  the nodes could not work as one gang
    │   └── GangStartTimeout       some nodes never arrived
    └── LaunchFailed               a worker, an agent or a node failed; names the cause
        ├── LaunchTimeout          the launch took longer than it may
        ├── WorkerFailed           a function raised or returned what can't be pickled
        ├── LaunchHung             no rank wrote or exited for longer than it may
        └── TorchrunPreempted      a node was told to stop, or its machine is taken away

The control node makes the error that stops a gang, and all nodes raise it with the same class and text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from metaflow.exception import MetaflowException as MetaflowException
except ImportError:  # `import metaflow` loads this module, and must not fail (2.19 has it)
    MetaflowException = Exception


class TorchrunError(MetaflowException):  # type: ignore[misc]  # Metaflow is not typed
    """Base class of every error of this extension.

    Parameters
    ----------
    message : str
        What happened, where, why, and what to change.
    cause : dict, optional
        The first failure of the gang, as plain data, where there is one; also an attribute.

    Attributes
    ----------
    events : list of dict
        What had happened to the gang since the launch before, in order, on the control node; empty on the others, and
        outside of launches. ``docs/seeing.md`` lists the fields.
    outputs : Outputs or None
        What ``run(outputs=...)`` could store after the failure, as `TorchrunResult.outputs`; None without that argument,
        or where the gang has not decided on the error.
    """

    events: list[dict[str, Any]]
    outputs: Any  # this module stands below that of Outputs

    def __init__(self, message: str = "", cause: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message, self.cause = message, cause
        # The failure as data (`gang/cause.FailureText`), of which `failed` has made both. None if no node has failed, or
        # after pickling.
        self._failure: Any = None
        self.events = []
        self.outputs = None

    @property
    def headline(self) -> str:
        """What Metaflow prints before the message: the class, as one catches it."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # MetaflowException keeps its message out of `args`, so the default would lose it.
        return type(self), (self.message, self.cause), {"events": self.events, "outputs": self.outputs}


class TorchrunConfigError(TorchrunError):
    """An attribute or argument is wrong. Nothing was started."""


class EntrypointError(TorchrunError):
    """No entrypoint was given, or it does not exist on this node."""


class TorchNotFoundError(TorchrunError):
    """PyTorch is not installed in the Python that runs the step."""


class GangError(TorchrunError):
    """The nodes could not work together as one gang."""


class GangStartTimeout(GangError):
    """Some nodes did not arrive in time."""


class LaunchFailed(TorchrunError):
    """A worker, an agent or a whole node failed. The message names the first of them."""


class LaunchTimeout(LaunchFailed):
    """A launch took longer than ``timeout_s`` or the step's ``@timeout`` allow."""


class WorkerFailed(LaunchFailed):
    """A function raised or returned what can't be pickled; the message holds its text."""


class LaunchHung(LaunchFailed):
    """No rank of a launch showed a sign of life for ``hang_timeout_s`` seconds."""


class TorchrunPreempted(LaunchFailed):
    """A node's task was told to stop (SIGTERM), or its machine is taken away (spot notice)."""

    remedy = (
        "With Metaflow's @retry, or by `resume`, a new gang starts, and a script that loads its checkpoint goes on."
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it is chained to, each once: ``raise error from error`` is a circle."""
    seen: dict[int, BaseException] = {}
    while error is not None and id(error) not in seen:
        seen[id(error)] = error
        yield error
        # An error may be false: its class may have `__len__` or `__bool__`.
        error = error.__context__ if error.__cause__ is None else error.__cause__


CLASSES = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, TorchrunError)
}
