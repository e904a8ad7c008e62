"""A feature's part in the supervisor: it watches the workers while one generation runs.

The core gives the workers the variables of each feature, polls its watcher, and sends
the watcher's data to the control node, whose gang takes it. The core knows no feature by name. A feature
that raises ends no launch: a line in the log's details says so once, and the feature is left out of this generation.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ..compat.renamed import harmless
from ..gang.messages import Report
from ..gang.wire import Plain
from ..machine.aside import Aside
from .agent import Asked, Options
from .agent_events import Refused
from .request import Request

# Frames have a larger limit, and shorten what is over it; data would not survive that.
MAX_TOLD_BYTES = 512 * 1024
# The variable with the paths of the hooks, for `worker_hooks`.
HOOKS = "TORCHRUN_HOOKS"


@dataclass(frozen=True)
class Here:
    """One generation on this node, as its watchers see it."""

    request: Request
    folder: str  # torchrun's --log-dir
    pid: Callable[[], int | None]  # of the agent, once it runs
    has_ended: Callable[[int], bool]  # takes a global rank
    say: Callable[[str], None]  # writes a line to the log's details
    show: Callable[[str], None]  # writes lines to the log
    running: Callable[[], Mapping[int, int]]  # returns the workers that run: global rank -> pid
    active_at: Callable[[], float | None]  # returns when a worker was last found to have written, reported or ended
    written: Callable[[], int]  # returns how many bytes the workers have written to stdout and stderr
    is_held_up: Callable[[], bool] = lambda: False  # returns whether the workers wait for who reads their output
    host: str = ""
    port: int = 0  # of torch's store, on the control node
    files: Aside = field(default_factory=Aside)  # does what the workers' disk may hold up


@dataclass(frozen=True)
class Variables:
    """Environment variables of the workers; they never replace those of the user."""

    of_node: Mapping[str, str] = field(default_factory=dict)
    # For programs in other languages, where no hook of ours runs: torchrun replaces ${local_rank} in them.
    of_rank: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()  # paths of Python programs that each worker runs before its own

    @property
    def names(self) -> set[str]:
        """The names of all variables; values that the task itself has inherited under them belong to another worker."""
        return {*self.of_node, *self.of_rank, HOOKS}


class Watcher:
    """What one feature does for one generation. It shares the supervisor's loop, so nothing here may wait for long."""

    # When it last had something from the workers themselves, which shows that they run.
    saw_workers_at: float | None = None

    def poll(self) -> Plain | None:
        """Return the data to send now; called at least twice a second, so mostly None."""
        return None

    async def before_stop(self, kind: str) -> Plain | None:
        """Examine the workers before they are stopped for a cause of this kind; return the data to send."""
        return None

    def asked(self, data: Plain) -> None:
        """Start to find out what the gang asks; `poll` returns the answer later."""

    async def ended(self) -> Plain | None:
        """Return the last data to send, when all workers have ended."""
        return None

    def close(self) -> None:
        """Release everything; safe to call more than once."""


class WarmStarts(Protocol):
    """Starts the agents of one node faster than cold."""

    def start(self, command: list[str], workers: int, env: Mapping[str, str], options: Options) -> Asked | Refused:
        """Return a spare that was asked to become an agent, with so many spare workers; or why there is none."""

    def prepare(self) -> None:
        """Prepare a spare for the next agent, in the background; raises nothing."""

    def renew(self) -> None:
        """As `prepare`, but replace a spare that may have imported packages which have changed since."""

    def close(self) -> None:
        """End the spare; safe to call more than once."""


class Watch:
    """A feature's part in each node's supervisor."""

    def spares(self, data: Plain) -> WarmStarts | None:
        """Start spares from the step's begin on; `data` is what `launch.services.InTask.starts` has returned."""
        return None

    def variables(self, request: Request, folder: str) -> Variables:
        """Return what workers whose logs lie in `folder` need to know."""
        return Variables()

    def watcher(self, here: Here) -> Watcher:
        """Return what watches one generation; its agent does not run yet."""
        return Watcher()


def spares_of(watches: Mapping[str, Watch], starts: Plain | None) -> WarmStarts | None:
    """Start the spares that the task asks for, if any."""
    if starts is not None and starts["feature"] in watches:
        with harmless():
            return watches[starts["feature"]].spares(starts["data"])
    return None


def variables_of(watches: Mapping[str, Watch], request: Request, folder: str, say: Callable[[str], None]) -> Variables:
    """Return the variables of all features."""
    all_of = Variables()
    for name, each in watches.items():
        with _no_harm(name, say):
            found = each.variables(request, folder)
            hooks = tuple(dict.fromkeys((*all_of.hooks, *found.hooks)))  # two features may need the same; it runs once
            all_of = Variables({**all_of.of_node, **found.of_node}, {**all_of.of_rank, **found.of_rank}, hooks)
    return all_of


class Watchers:
    """The watchers of one generation."""

    def __init__(self, watches: Mapping[str, Watch], here: Here, launch: int, generation: int) -> None:
        self._say = here.say
        self._about = launch, generation
        self._watchers: dict[str, Watcher] = {}
        for name, each in watches.items():
            with _no_harm(name, here.say):
                self._watchers[name] = each.watcher(here)

    @property
    def saw_workers_at(self) -> float | None:
        """When any watcher last had something from the workers themselves."""
        return max((at for each in self._watchers.values() if (at := each.saw_workers_at) is not None), default=None)

    def poll(self) -> list[Report]:
        """Return the data of all features to send now."""
        found = []
        for name, watcher in list(self._watchers.items()):
            with self._no_harm(name):
                if (data := watcher.poll()) is not None:
                    found.append(self._as_told(name, data))
        return found

    async def before_stop(self, kind: str) -> list[Report]:
        """Have all features examine the workers before they are stopped."""
        return await self._told(lambda watcher: watcher.before_stop(kind))

    def asked(self, feature: str, data: Plain) -> None:
        """Hand what the gang asks to the watcher of its feature; what was left out hears nothing."""
        watcher = self._watchers.get(feature)
        if watcher is not None:
            with _no_harm(feature, self._say):
                watcher.asked(data)

    async def ended(self) -> list[Report]:
        """Return the last data to send, when all workers have ended."""
        return await self._told(lambda watcher: watcher.ended())

    def close(self) -> None:
        """Release everything; safe to call more than once."""
        for name, watcher in self._watchers.items():
            self._close(name, watcher)
        self._watchers = {}

    async def _told(self, ask: Callable[[Watcher], Awaitable[Plain | None]]) -> list[Report]:
        found = []
        for name, watcher in list(self._watchers.items()):
            with self._no_harm(name):
                if (data := await ask(watcher)) is not None:
                    found.append(self._as_told(name, data))
        return found

    def _as_told(self, name: str, data: Plain) -> Report:
        return Report(name, *self._about, _checked(data))

    @contextmanager
    def _no_harm(self, name: str) -> Iterator[None]:
        """Leave out a feature that raises."""
        has_failed = True
        with _no_harm(name, self._say):
            yield
            has_failed = False
        if has_failed and (watcher := self._watchers.pop(name, None)) is not None:
            self._close(name, watcher)

    def _close(self, name: str, watcher: Watcher) -> None:
        with _no_harm(name, self._say):
            watcher.close()


def _checked(data: Plain) -> Plain:
    """Return `data`, or raise ValueError if it is too large to send."""
    size = len(json.dumps(data, allow_nan=False))
    if size > MAX_TOLD_BYTES:
        raise ValueError(f"it sends {size} bytes at once, and the limit is {MAX_TOLD_BYTES}")
    return data


@contextmanager
def _no_harm(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Log an exception of a feature instead of raising it."""

    def tell(error: Exception) -> None:
        say(f"this node reports nothing more of its {name}: {type(error).__name__}: {error}")

    with harmless(tell):
        yield
