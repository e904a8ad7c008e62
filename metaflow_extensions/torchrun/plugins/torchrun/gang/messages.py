"""Every message between the control node and the nodes of its gang. Read this file first.

The control node decides, and every node does what it is told; so nodes talk to the control node only.
Node 0 is the control node and a node of its own gang: its own messages take the same way, without a socket::

    a node                                   the control node
    ──────                                   ────────────────
    Join                                ──>
                                        <──  Answer
    Ready: the step has called `run`    ──>
                                        <──  Go, when all nodes are ready and agree
    Report, Lines, Failed               ──>
                                        <──  Ask, when more is to be known
                                        <──  Stop, when a node has failed
    Ended                               ──>
                                        <──  another Go; or Store, if there is something to store;
                                             or Verdict for a node that is told to end, and the others go on
    Report and Stored                   ──>
                                        <──  Verdict
    Leave("done"): the step has ended   ──>
    Leave("left"): nothing more comes   ──>
                                        <──  Farewell

At any time the control node may send `Note` (a line for the log), `Abort` (the gang is broken) and `Farewell`.
Both sides send `Beat`, so that silence means loss.

A message is a frozen dataclass. `to_wire` makes plain data of it, `from_wire` makes it again and refuses what
does not fit; `supervisor.connection` makes bytes of the data. A launch and a generation in a message say what it is about,
so that a message that arrives late is recognised.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..errors import TorchrunError
from .cause import Cause, Failure
from .policy import Group, LaunchPolicy
from .view import Happened
from .wire import from_plain, to_plain

CONTROL = 0
"""Index of the control node."""
What: TypeAlias = Literal["stacks", "stop", "profile"]
"""What is asked of nodes: what each rank does now, to have the ranks wait in their next call of `stopping`, a profile."""

# --- from a node to the control node --------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """The first message of a connection; `Answer` answers it."""

    node: int
    host: str = "unknown"  # its host name, for messages
    task: str = ""  # names the process that joins. One that has lost its connection joins again under the same name


@dataclass(frozen=True)
class Report:
    """What only adds to what is known of a node; nobody waits for it."""

    # "before_run" (its commands begin), "command" (one has ended or could not be started), "started" (all workers of this
    # node run), "wrote" (a worker has written something, the first of this generation), "unreached" (its agent gets no
    # answer from torch's store), or what an observer or a service tells.
    kind: str
    launch: int
    generation: int | None = None  # None: of whatever generation
    data: dict[str, Any] = field(default_factory=dict)  # plain data, far below the limit of a frame


@dataclass(frozen=True)
class Ready:
    """The step's code has called `run`; `Go` answers when all nodes are ready, `Verdict` if they can't start."""

    launch: int  # number of the launch in the step
    nproc: int  # processes on this node
    digest: str = ""  # fingerprint of the entrypoint and of torchrun's options
    # What else must be the same on all nodes: name -> value, for example the version of torch.
    facts: dict[str, str] = field(default_factory=dict)
    master_port: int | None = None  # the rendezvous' port if it is pinned; the control node's counts
    policy: LaunchPolicy | None = None  # limits and restarts; only the control node sends it


@dataclass(frozen=True)
class Failed:
    """A worker or the agent of this node has failed; `Ended` follows when all its workers are gone.

    Before `Ready`, a command of before_run has failed; then `Verdict` answers.
    """

    launch: int
    generation: int | None = None  # None: of whatever generation
    failures: tuple[Failure, ...] = ()  # what has failed; of many the first
    # Whether the node's own code has ended its call of `run`, so that it can't take part in a restart.
    given_up: bool = False


@dataclass(frozen=True)
class Lines:
    """What workers of this node have written, for the control node's log; sent where all nodes' lines are shown there.

    Nobody waits for it: what is too much is left out.
    """

    texts: tuple[tuple[str, str], ...]  # streams and whole lines with their labels, in the order of writing
    left_out: int = 0  # so many lines before these are not sent


@dataclass(frozen=True)
class Ended:
    """All workers and the agent of this node are gone.

    When that holds for all nodes, `Store`, `Verdict` or another `Go` answers.
    """

    launch: int
    ok: bool  # whether all ended well
    generation: int | None = None  # None: of whatever generation
    failures: tuple[Failure, ...] = ()  # what has failed; of many the first
    exit_codes: dict[int, int] = field(default_factory=dict)  # by global rank, where they are known
    stores: bool = False  # whether it may have something to store, see `Store`
    alone: bool = False  # whether every worker has computed gradients and had no process group for them
    early: tuple[int, ...] = ()  # of a failed node: ranks that had ended with code 0 before any was told to stop
    stopped: bool = False  # whether `stopping` has told a rank to stop


@dataclass(frozen=True)
class Stored:
    """Answers `Store`: all that is wanted of this node is in the datastore, or can't be stored.

    A `Report` has told before where it is.
    """

    launch: int
    generation: int
    failures: tuple[Failure, ...] = ()  # why something could not be stored


@dataclass(frozen=True)
class Leave:
    """This node's step or task has ended."""

    # "done": the step's code has ended well, and its results are not stored yet; "left": all is stored; "failed": the
    # step has failed; "killed": the task is gone without a word, and its supervisor says so.
    how: Literal["done", "left", "failed", "killed"]
    cause: Cause | None = None  # what ended its step, unless the gang has heard of it
    text: str = ""  # how its task was killed, as in "its task was killed by SIGKILL"


@dataclass(frozen=True)
class Beat:
    """The sender lives; both sides send it."""


# --- from the control node to a node --------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer to *join*: without an error, the node is a member of the gang now."""

    error: TorchrunError | None = None
    is_early: bool = False  # the node shall try again: it can't take the place of the task before it yet


@dataclass(frozen=True)
class Go:
    """Start the workers."""

    launch: int  # it and the generation count from 0
    generation: int  # the workers' ``TORCHELASTIC_RESTART_COUNT``
    port: int  # port of the rendezvous on the control node
    gang: str  # the gang's own name; it goes into the name of the rendezvous
    max_restarts: int  # the workers' ``TORCHELASTIC_MAX_RESTARTS``
    group: Group | None = None  # the nodes that start workers, the others wait; None: all do
    # Of a restart, the nodes that take part no more, and those that do instead; a node with a new task is in both.
    left: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    again: str = ""  # for the log
    cause: Cause | None = None


@dataclass(frozen=True)
class Stop:
    """Stop all workers and say `Ended`."""

    launch: int
    generation: int
    because: str = ""  # why, in a line; empty if it need not be said
    teller: int = CONTROL  # the node whose log says more
    # What the workers get first, so that they can save; None: SIGTERM for the whole tree at once.
    signal: int | None = None


@dataclass(frozen=True)
class StopAt:
    """The ranks that wait in a call of `metaflow_torchrun.stopping` shall go on, and stop at this one."""

    launch: int
    generation: int
    call: int  # counted from 1; 0: none stops


@dataclass(frozen=True)
class Ask:
    """A question about this node's workers; a `Report` answers. It is given up where no answer comes in time."""

    launch: int
    generation: int
    id: str  # of the question, for the answer
    what: What
    of: dict[str, Any] = field(default_factory=dict)  # the arguments of what answers it on the node


@dataclass(frozen=True)
class Store:
    """No worker is left and no restart follows: store what there is; `Stored` answers.

    All nodes get it, and so know what has failed, even if the control node is gone before they hear the verdict.
    """

    launch: int
    generation: int
    error: TorchrunError | None = None  # what the verdict will be
    within_s: float | None = None  # how long it may take after a failure
    group: Group | None = None  # of that generation, as in `Go`


@dataclass(frozen=True)
class Verdict:
    """The launch is over."""

    launch: int
    error: TorchrunError | None = None  # what every node raises; None: it has ended well
    events: tuple[Happened, ...] = ()  # to the control node: what has happened since the launch before
    left: dict[str, dict[str, Any]] = field(default_factory=dict)  # the values, outputs and metrics that it has left
    alone: bool = False  # whether the launch has ended well and, on all nodes, as `Ended.alone` says
    group: Group | None = None  # of the last generation; None: there was none
    stopped: bool = False  # whether a command has had all ranks stop
    goodput: dict[str, Any] = field(default_factory=dict)  # to the control node: where the time went

    def is_without(self, node: int) -> bool:
        """Return whether the launch has ended well without a node, which leaves therefore."""
        return self.error is None and self.group is not None and self.group.rank_of(node) is None


@dataclass(frozen=True)
class Abort:
    """The gang is broken: nothing can be launched any more, and the step's code shall raise `error`."""

    error: TorchrunError


@dataclass(frozen=True)
class Note:
    """A line for the node's log."""

    text: str


@dataclass(frozen=True)
class Farewell:
    """Of the gang's end, or that of a node in it."""

    # "received": the control node has read that this node leaves; "bye": the control node leaves, and the end of its
    # connection is no loss; "alone", to the control node: all others have left.
    what: Literal["received", "bye", "alone"]


OfLaunch: TypeAlias = Go | Ask | Stop | StopAt | Store | Verdict
"""What concerns who runs a launch on a node."""
Message: TypeAlias = (
    Join | Ready | Report | Failed | Ended | Stored | Leave | Lines | Beat
    | Answer | OfLaunch | Abort | Note | Farewell
)  # fmt: skip
_CLASSES: dict[str, type[Any]] = {cls.__name__.lower(): cls for cls in typing.get_args(Message)}


# --- to the wire and back -------------------------------------------------------------------------


def to_wire(message: Message) -> dict[str, Any]:
    """Return a message as JSON-able data; ``"type"`` is the name of its class in small letters."""
    return {"type": type(message).__name__.lower(), **to_plain(message)}


def from_wire(data: Mapping[str, Any]) -> Message:
    """Return the message that `to_wire` was given; raise ValueError, which names it and what does not fit, if none."""
    name = data.get("type")
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"there is no message of type {str(name)[:40]!r}")
    message: Message = from_plain(cls, {key: value for key, value in data.items() if key != "type"}, name or "")
    return message
