"""Objects of a supervisor's loop, for tests: each loop has a thread of its own."""

import asyncio
import inspect
import threading

from limits import limit_s
from unit_helpers import HANG_S


class Loop:
    """An asyncio loop in a thread; `on_error` is called there with what a callback has raised."""

    def __init__(self, on_error=None):
        self.loop = asyncio.SelectorEventLoop()
        self.on_error = on_error
        self.loop.set_exception_handler(self._on_error)
        self._thread = threading.Thread(target=self._run, name="loop of a test", daemon=True)
        self._thread.start()

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _on_error(self, _, about):
        if self.on_error is not None and "exception" in about:
            self.on_error(about["exception"])

    def call(self, function, *args, **options):
        """Return what a function returns, or its coroutine; it runs in the loop."""

        async def run():
            found = function(*args, **options)
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(limit_s(2 * HANG_S))

    def post(self, function, *args):
        """Have a function called in the loop soon."""
        self.loop.call_soon_threadsafe(function, *args)

    def stop(self):
        """End the loop and its thread."""
        self.post(self.loop.stop)
        self._thread.join(limit_s(HANG_S))
        self.loop.close()


class InLoop:
    """An object whose methods run in its loop, whoever calls them."""

    def __init__(self, loop, make):
        self.in_loop = loop
        self.itself = loop.call(make)

    def __getattr__(self, name):
        found = getattr(self.itself, name)
        if not callable(found):
            return found
        return lambda *args, **options: self.in_loop.call(found, *args, **options)
