"""The thread of a supervisor in which its channel's connections live.

Each channel runs one asyncio loop in a daemon thread of its own. The loop, its connections and what they
hold belong to that thread; the others hand it work with `LoopThread.call` and `LoopThread.post`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

CLOSE_S = 5.0
"""How long another thread waits for what it asks of the loop, and for the loop's end."""


class LoopThread:
    """An asyncio loop in a daemon thread; `on_error` is called there with what a callback has raised."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.loop.set_exception_handler(lambda _, what: on_error(what["exception"]) if "exception" in what else None)
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
