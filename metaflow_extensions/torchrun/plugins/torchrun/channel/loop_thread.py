"""The thread in which a channel's connections live.

Each channel runs one asyncio loop in a daemon thread of its own. The loop, its connections and what they
hold belong to that thread; the others hand it work with `LoopThread.call` and `LoopThread.post`.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

CLOSE_S = 5.0
"""How long another thread waits for what it asks of the loop, and for the loop's end."""


class LoopThread:
    """An asyncio loop in a daemon thread; `on_error` is called there with what a callback has raised."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        # Always a selector loop, whatever policy the step has set (uvloop, for example): `descriptors` reads its selector.
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self.loop.set_exception_handler(lambda _, what: on_error(what["exception"]) if "exception" in what else None)
        _all.add(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)  # `gather` below asks for it
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self.loop), return_exceptions=True))
        self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine in the loop and return its result; call it in any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop soon, in the order of the calls. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed: the gang is over
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the thread; call it in any other thread."""
        self.post(self.loop.stop)
        self._thread.join(CLOSE_S)

    def descriptors(self) -> list[int]:
        """Return the files that the loop watches, and the one with which it does."""
        if self.loop.is_closed():
            return []
        own = getattr(self._selector, "fileno", None)  # epoll has one
        return [*self._selector.get_map(), *([own()] if own is not None else [])]


_all: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Close the parent's connections in a forked child.

    The child may outlive the task, and the other nodes detect a task's end by its closed connections. The sockets are
    not unregistered: parent and child share one epoll instance, so that would make the parent deaf. Each descriptor
    becomes the null device instead of being closed: Python objects in the child still own the number, and would later
    close whatever file had got it meanwhile.
    """
    numbers = [number for thread in _all for number in thread.descriptors()]
    if numbers:
        null = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            os.dup2(null, number, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_in_forked_child)
