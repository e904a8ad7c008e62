"""What a launch on one node hears, and what it wants done: news and effects, as plain data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import TorchrunError
from ..events import Event
from ..gang.cause import Failure
from ..gang.messages import Ask, Ended, Go, Message, Restart, Stop, Store, Verdict
from .endings import Broken, GivenUp, MustEnd, TimedOut
from .outcome import Outcome
from .plan import Plan


@dataclass(frozen=True)
class Called:
    """The task has called `run`; `broken` is why the gang can't launch any more."""

    broken: TorchrunError | None


@dataclass(frozen=True)
class Completed:
    """The plan after its commands, which may have made the entrypoint, or installed torch."""

    plan: Plan


@dataclass(frozen=True)
class Prepared:
    """A generation can be started; `command` is its agent's, quoted for a shell."""

    command: str


@dataclass(frozen=True)
class Begun:
    """The agent of a generation has been started."""


@dataclass(frozen=True)
class NotBegun:
    """The commands or a generation could not be started."""

    why: str


@dataclass(frozen=True)
class Seen:
    """What has been seen of the commands of before_run, or of the workers."""

    told: Sequence[Message | Event] = ()  # for the gang and the log
    all_run: bool = False  # whether all workers of this node run, or have run
    has_written: bool = False  # whether workers have
    failed: str = ""  # what has failed, for the log; empty for what was stopped
    failures: tuple[Failure, ...] = ()
    is_over: bool = False  # no process is left; of commands: and all have ended well


@dataclass(frozen=True)
class WorkersEnded:
    """How the workers have ended; all that they wrote was read."""

    ended: Ended
    told: Sequence[Message | Event] = ()  # before that
    has_written: bool = False


@dataclass(frozen=True)
class Crashed:
    """What is done here has raised an error, or the launch was cancelled."""

    error: BaseException


News: TypeAlias = (
    Called | Completed | Prepared | Begun | NotBegun | Seen | WorkersEnded | Crashed
    | Go | Ask | Stop | Restart | Store | Verdict | Broken | MustEnd | TimedOut | GivenUp
)  # fmt: skip


class Do(enum.Enum):
    """An effect without data."""

    START_COMMANDS = "start the commands of before_run; answered by `Seen`, or by `NotBegun` if that fails"
    COMPLETE = "have the task complete the plan"
    START = "start the agent of a generation; answered by `Begun` or `NotBegun`"
    STOP = "stop the workers"
    FINISH = "read the last that the ended workers wrote, and close agent and watchers; answered by `WorkersEnded`"
    CLOSE = "stop the commands or workers with their grace, wait for their end, and remove their files"
    CLOSE_NOW = "do so without a grace; after FINISH, only their files are left"
    GIVE_UP_STORING = "have the task store no more"
    PREPARE_WARM = "prepare a spare for the next agent"


Effect: TypeAlias = Do | Event | Message | Outcome | BaseException
"""What is to be done.

An `Event` is logged. A message of this node is sent to the control node. What the gang has sent is obeyed: *go* makes a
generation (answered by `Prepared` or `NotBegun`), *ask* goes to a watcher, *stop* stops the workers after the watchers have
examined them (answered by `Seen`), and *store* has the task store what they have left. An outcome is returned by `run`,
an error is raised there.
"""
