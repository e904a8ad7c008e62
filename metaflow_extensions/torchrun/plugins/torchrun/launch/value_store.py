"""Carries values from node to node through Metaflow's datastore."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ..compat.renamed import need

# What is left out where the datastore can't be used.
OUTPUTS = "the datastore: outputs can't be stored, nor values of functions sent from node to node"


class DatastoreValues:
    """The content-addressed part of a flow's datastore, where artifacts lie, too."""

    def __init__(self, flow_datastore: Any) -> None:
        self._store = flow_datastore  # metaflow.datastore.FlowDataStore, 2.19
        kind, root = flow_datastore.TYPE, flow_datastore.datastore_root
        self.where = f"the {kind} datastore {root}"
        self.folder: str | None = root if kind == "local" else None
        self.address: Mapping[str, str] = {"type": kind, "root": root, "flow": flow_datastore.flow_name}

    def save(self, data: bytes) -> str:
        """Store `data` and return its key, which is the same for the same data."""
        ((_, key),) = need(self._store, "save_data")([data], len_hint=1)
        return str(key)

    def load(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of `keys` with what was stored under it; a list, because some stores load many at once."""
        yield from need(self._store, "load_data")(list(keys))

    def trouble(self) -> str | None:
        """Return the error of the S3 client's last try, if it tries again now.

        It tries for over an hour and says nothing meanwhile: botocore in threads of its own
        (``Endpoint._send_request``, 1.44), and Metaflow around it (``S3._one_boto_op``, 2.19). The error
        is in a variable of the functions that wait, so their frames are searched.
        """
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None:
                name, known = frame.f_code.co_name, frame.f_locals
                if name == "_one_boto_op" and known.get("error"):
                    return str(known["error"])
                if name == "_send_request" and known.get("attempts", 0) > 1:
                    return _answer(known.get("success_response"), known.get("exception"))
                frame = frame.f_back
        return None


def _answer(response: Any, exception: Any) -> str | None:
    """Return the error in an answer as botocore has it."""
    if exception is not None:
        return f"{type(exception).__name__}: {exception}"
    with suppress(TypeError, IndexError, KeyError):
        return "{Code}: {Message}".format_map(response[1]["Error"])
    return None
