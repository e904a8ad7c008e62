"""Carries values from node to node through Metaflow's datastore."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any


class DatastoreValues:
    """The content-addressed part of a flow's datastore, where artifacts lie, too.

    Parameters
    ----------
    flow_datastore : metaflow.datastore.FlowDataStore
        The run's datastore (``save_data`` and ``load_data``, Metaflow 2.19).
    """

    def __init__(self, flow_datastore: Any) -> None:
        self._store = flow_datastore

    @property
    def where(self) -> str:
        """Its kind and its root."""
        return f"the {self._store.TYPE} datastore {self._store.datastore_root}"

    def save(self, data: bytes) -> str:
        """Store `data` and return its key, which is the same for the same data."""
        ((_, key),) = self._store.save_data([data], len_hint=1)
        return str(key)

    def load(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of `keys` with what was stored under it; a list, because some stores load many at once."""
        yield from self._store.load_data(list(keys))

    def trouble(self, thread: int) -> str | None:
        """Return with what the S3 client's last try in `thread` has failed.

        It tries again for over an hour and says nothing meanwhile (``S3._one_boto_op``, Metaflow 2.19); what it
        knows is in the local variable of a frame that waits.
        """
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_name == "_one_boto_op":
                return frame.f_locals.get("error") or None
            frame = frame.f_back
        return None
