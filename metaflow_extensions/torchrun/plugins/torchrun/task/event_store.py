"""Stores the gang's history in the datastore, beside the control node's task.

A thread of its own writes, when there is something to write. So a slow datastore delays neither gang nor step, except for
up to 5 s at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..channel.background import NEVER, Pauses
from ..channel.client import ControlClient
from ..channel.registry import Registry
from ..errors import GangError
from ..records.snapshot import Snapshot
from ..records.vanished import has_begun

_EVERY_S = 5.0
# Between two writes until the gang has begun. From then on a task that replaces this one must not run the step's code
# again, and only this record can show it that the gang has begun.
_SOON_S = 0.25
# The features' data (such as the nodes' usage) changes all the time, and with many nodes it is a megabyte. So changes of
# it alone are written only this often.
_NUMBERS_EVERY_S = 60.0
_PATIENCE_S = 5.0  # for one writing, and for the last one at the step's end


class EventStore:
    """Writes the history of one gang from its begin to its end."""

    def __init__(self, registry: Registry, gang: ControlClient, about: Mapping[str, Any]) -> None:
        self._registry = registry
        self._gang = gang  # only asked
        self._about = about  # what else is known of the gang, as plain data; other threads may add to it
        self._pid = os.getpid()
        # Only the thread that writes touches the fields from here to `_numbers_due_at`.
        self._pause_s, self._due_at = _SOON_S, 0.0
        self._written = 0  # how many records the datastore knows of
        self._numbers, self._numbers_due_at = 0, time.monotonic() + _NUMBERS_EVERY_S
        self._is_urgent = self._is_over = False
        self._work = gang.in_background("torchrun-events", self._save_if_due)
        self._work.begin()

    def save_soon(self) -> None:
        """Write new records now, not at the next interval."""
        self._is_urgent = True
        self._work.begin()

    def close(self) -> None:
        """Write the last records, within 5 s; can be repeated, and has no effect in a forked child."""
        if os.getpid() == self._pid:
            self._is_over = True
            self._work.begin()
            self._work.settle(_PATIENCE_S)

    def _save_if_due(self) -> Pauses:
        is_urgent, self._is_urgent = self._is_urgent or self._is_over, False
        count, numbers, _ = self._gang.counts()
        now = time.monotonic()
        if count > self._written:
            due_at = self._due_at
        elif numbers != self._numbers:
            due_at = self._numbers_due_at
        else:
            return self._pause_s, NEVER
        if now < due_at and not is_urgent:
            # The news may be a record, which is due sooner than numbers.
            return min(due_at - now, self._pause_s), due_at - now
        self._due_at = now + self._pause_s
        with suppress(GangError):  # the next write tries again
            snapshot = self.snapshot()
            self._registry.save_snapshot(snapshot, _PATIENCE_S)
            self._pause_s = _EVERY_S if has_begun(snapshot) else _SOON_S
            self._written, self._numbers = count, numbers
            self._due_at = time.monotonic() + self._pause_s
            self._numbers_due_at = time.monotonic() + _NUMBERS_EVERY_S
            return self._pause_s, NEVER
        return self._pause_s, self._pause_s

    def snapshot(self) -> Snapshot:
        """Return what is known of the gang now."""
        return self._gang.snapshot(dict(self._about))
