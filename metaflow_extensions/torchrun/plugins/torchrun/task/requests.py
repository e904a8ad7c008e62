"""Looks for what commands ask of the gang while its step runs, and stores the answers; on the control node alone.

A thread of its own (`torchrun-requests`) talks to the datastore, so a slow one delays nobody. It is there while it looks. It
hands a request to the gang, and takes the answer from `Keepers.pop_answer`.

Who may write the step's datastore may ask; nobody else can. A look is one request of an object store. So it is made
twice a minute, and more often only for a minute after something was asked. On a local disk a look costs next to
nothing. But while the step's own code runs, each look interrupts it for a moment, and no worker is there to be asked
about: then it is made twice a minute there, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from ..channel.background import Pauses, Work
from ..channel.registry import Registry
from ..gang.keepers import Plain
from ..machine import native
from ..records.requests import Answer, Request

_LOOK_S = 30.0
_LOOK_SOON_S = 3.0
_LOOK_LOCAL_S = 0.5
_SOON_FOR_S = 60.0
# A request of long ago is not answered: who asked does not wait any more. The clocks of two machines may differ so much.
_TOO_OLD_S = 600.0
# Features answer within their own, shorter, time. It bounds how long the next request has to wait.
_ANSWER_S = 40.0
_ANSWER_LOOK_S = 0.1


class Requests:
    """Answers what is asked of one gang, from its start to its end."""

    def __init__(
        self,
        registry: Registry,
        ask: Callable[[str, Plain], None],
        pop_answer: Callable[[str], Plain | None],
        begin: Callable[[str, Callable[[], Pauses]], Work],
        is_on_disk: bool,
        runs_own_code: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._ask, self._pop_answer = ask, pop_answer
        self._is_on_disk = is_on_disk  # whether a look costs next to nothing
        self._runs_own_code = runs_own_code
        self._last = ""  # the id of the last request that was looked at
        self._soon_until = 0.0
        self._pid = os.getpid()
        self._is_over = False
        begin("torchrun-requests", self._look_once).begin()

    def close(self) -> None:
        """Look no more; without effect in a forked child, whose copy has no thread. Nobody waits for a slow datastore."""
        if os.getpid() == self._pid:
            self._is_over = True

    def _look_once(self) -> Pauses:
        if not self._is_over:
            with suppress(Exception):  # a datastore that fails: the next look tries again
                self._look()
        if not self._is_on_disk:
            pause_s = _LOOK_SOON_S if time.monotonic() < self._soon_until else _LOOK_S
            return pause_s, pause_s
        # A launch's begin is news.
        return _LOOK_LOCAL_S, _LOOK_S if self._runs_own_code() else _LOOK_LOCAL_S

    def _look(self) -> None:
        request = self._registry.load_request()
        if request is None or request.id == self._last:
            return
        self._last = request.id
        if time.time() - request.time < _TOO_OLD_S:
            self._soon_until = time.monotonic() + _SOON_FOR_S
            self._answer(request)

    def _answer(self, request: Request) -> None:
        self._ask(request.feature, {**request.data, "id": request.id})
        give_up_at = time.monotonic() + _ANSWER_S
        data: Plain | None = None
        while time.monotonic() < give_up_at and not self._is_over:
            native.sleep(_ANSWER_LOOK_S)
            data = self._pop_answer(request.feature) or data
            if data is not None and data.get("id") == request.id:
                with suppress(Exception):  # a datastore that fails: the same answer is stored a moment later
                    self._registry.save_answer(Answer(request, time.time(), data))
                    return
