"""``hang_timeout_s``: how long all ranks of a launch may be silent."""

from __future__ import annotations

from ...gang.wire import Plain
from ...launch.services import InTask, RunCall, Service


class Hangs(InTask):
    """The limit of a launch."""

    def service(self, call: RunCall) -> Service | None:
        """Return what tells the gang the limit, if there is one."""
        limit_s = call.settings.hang_timeout_s
        return None if limit_s is None else HangLimit(limit_s)


class HangLimit(Service):
    """Tells the gang the limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    @property
    def policy(self) -> Plain:
        """The limit, in seconds."""
        return {"timeout_s": self._limit_s}


PART = Hangs()
