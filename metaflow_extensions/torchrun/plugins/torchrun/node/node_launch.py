"""Runs one launch on one node: hands what happens to its `NodeCourse`, and carries out what that wants done.

Everything that it waits for arrives in one queue, the launch's inbox: the gang's messages, the agent's events, and what
the task says. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from typing import Any

from ..events import Event
from ..gang.messages import Ask, Go, Stop, Store
from ..machine.aside import Aside
from ..machine.looks import until_look
from .agent import AgentProcess
from .agent_events import AgentNews
from .commands import Commands
from .course import NodeCourse
from .endings import MustEnd, TimedOut
from .generation import Generation
from .news import Begun, Called, Crashed, Do, Effect, News, NotBegun, Prepared, Seen
from .outcome import Outcome
from .plan import Plan
from .seat import Seat
from .start import prepare

_START_S = 120.0  # for the disk of TMPDIR: a server of files may start again meanwhile


class NodeLaunch:
    """One launch on one node; an agent other than `AgentProcess` is for tests.

    `complete` asks the task for `Completed`. `store` has it store what the workers have left, and answer the gang;
    without an argument, it gives that up.
    """

    def __init__(
        self,
        plan: Plan,
        seat: Seat,
        launch: int,
        complete: Callable[[], None],
        store: Callable[[Store | None], None],
        new_agent: Callable[..., AgentProcess] = AgentProcess,
    ) -> None:
        self._course = NodeCourse(plan, launch, seat.node, seat.host)
        self._seat, self._launch, self._new_agent = seat, launch, new_agent
        self._complete, self._store = complete, store
        self._processes: Commands | Generation | None = None  # from their start until they are closed
        self._end: Outcome | BaseException | None = None
        self.interruptions = 0  # how many it has handled

    async def run(self) -> Outcome:
        """Run the launch to its end on all nodes, and return that; raise what ends it here without a verdict."""
        self._seat.begin_launch()
        try:
            await self._take(Called(self._seat.broken))
            while self._end is None:
                news = await self._next()
                await self._take(self._seen(news))
                await self._take(None if self._processes is None else self._processes.poll(is_quiet=news is None))
        except BaseException as error:
            await self._take(Crashed(error))
            raise
        finally:
            await self._close(self._course.plan.grace_s)  # something is left only where an effect has raised
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    async def _next(self) -> Any:
        """Return what comes next, or None when it is time to poll the features."""
        try:
            return await asyncio.wait_for(self._seat.inbox.get(), until_look())
        except asyncio.TimeoutError:
            return None

    def _seen(self, news: Any) -> News | None:
        """Return what came as news for the course; None for an event of processes that are gone."""
        self.interruptions += isinstance(news, MustEnd | TimedOut)
        if not isinstance(news, AgentNews):
            found: News | None = news
            return found
        if self._processes is None or self._processes.number != news.generation:
            return None
        return self._processes.handle(news.event)

    async def _take(self, news: News | None) -> None:
        """Hand news to the course, and carry out what follows. An answer is handled at once: such an effect is the last."""
        for effect in () if news is None else self._course.handle(news, time.monotonic()):
            await self._take(await self._do(effect))

    async def _do(self, effect: Effect) -> News | None:
        """Carry out an effect; return its answer, if it has one."""
        match effect:
            case Event():
                self._seat.emit(effect)
            case Go():
                return await self._prepare_workers(effect)
            case Ask():
                self._workers.watchers.asked(effect.kind, effect.data)
            case Stop():
                return await self._workers.obey(effect)
            case Store():
                self._store(effect)
            case Outcome() | BaseException():
                self._end = effect
            case Do.START_COMMANDS:
                return await self._start_commands()
            case Do.COMPLETE:
                self._complete()
            case Do.START:
                return self._start_workers()
            case Do.STOP:
                self._workers.stop()
            case Do.FINISH:
                return await self._workers.finish()
            case Do.CLOSE:
                await self._close(self._course.plan.grace_s)
            case Do.CLOSE_NOW:
                await self._close(0.0)
            case Do.GIVE_UP_STORING:
                self._store(None)
            case Do.PREPARE_WARM:
                self._course.plan.prepare_warm()
            case message:
                self._seat.link.send(message)
        return None

    @property
    def _workers(self) -> Generation:
        assert isinstance(self._processes, Generation)
        return self._processes

    async def _start_commands(self) -> Seen | NotBegun:
        try:
            about = self._course.plan, self._seat, self._launch, self._new_agent
            self._processes = commands = await Aside().within(_START_S, Commands, *about)
            return commands.start()
        except Exception as error:
            return NotBegun(_reason(error))

    async def _prepare_workers(self, go: Go) -> Prepared | NotBegun:
        try:
            about = self._course.plan, go, self._seat, self._new_agent
            self._processes = generation = await Aside().within(_START_S, prepare, *about)
        except Exception as error:  # a full disk, a zero byte in a variable
            return NotBegun(_reason(error))
        return Prepared(shlex.join(generation.command))

    def _start_workers(self) -> Begun | NotBegun:
        try:
            self._workers.start()
        except Exception as error:  # no more processes
            return NotBegun(_reason(error))
        return Begun()

    async def _close(self, grace_s: float) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            await processes.close(grace_s)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
