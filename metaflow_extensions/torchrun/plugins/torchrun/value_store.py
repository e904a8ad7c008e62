"""Carries values from node to node through Metaflow's datastore."""

from __future__ import annotations

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

    def save(self, data: bytes) -> str:
        """Store `data` and return its key, which is the same for the same data."""
        ((_, key),) = self._store.save_data([data], len_hint=1)
        return str(key)

    def load(self, key: str) -> bytes:
        """Return what was stored under `key`."""
        ((_, data),) = self._store.load_data([key])
        return bytes(data)
