"""Uploads a remote task's log at once when the gang reports a failure.

In a pod or container Metaflow writes the task's output to files. It uploads them every half second at first,
and every 30 s later (`update_delay` in ``metaflow/mflog/__init__.py``, 2.19). But a Kubernetes job set is
torn down within seconds of one pod's end, and the control node's lines about the cause must be uploaded before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

# Where Metaflow's wrapper of the task keeps its output (`export_mflog_env_vars`, 2.19).
_FILES = {"stdout": "MFLOG_STDOUT", "stderr": "MFLOG_STDERR"}
# From our write through Metaflow's `tee` process to the file.
_TEE_S = 0.3


class TaskLog:
    """The log of this task, as Metaflow's datastore has it."""

    def __init__(self, upload: Callable[[dict[str, Path]], None], environ: Mapping[str, str] = os.environ) -> None:
        self._upload = upload  # stores the files that it is given, by stream
        self._files = {stream: Path(environ[name]) for stream, name in _FILES.items() if environ.get(name)}
        self._uploading = threading.Lock()  # or an older state of the log could come last

    def save(self, wait_s: float = 0.0) -> None:
        """Upload the log in a thread of its own, and wait for it `wait_s` seconds at most.

        A failure is ignored: Metaflow uploads the log once more at the task's end.
        """
        if self._files:
            saving = threading.Thread(target=self._save, name="torchrun-log", daemon=True)
            saving.start()
            saving.join(wait_s)

    def _save(self) -> None:
        time.sleep(_TEE_S)
        with self._uploading, suppress(OSError):
            self._upload({stream: path for stream, path in self._files.items() if path.exists()})
