"""What a failed rank wrote last, where its lines are not shown while it runs.

A node knows at the end of its workers which of its ranks failed first. Whether that was the gang's first failure, it
hears from the control node, before or after.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..gang.cause import Cause
from ..logs.follower import worker_folder
from .exits import read_end

_LINES = 100


class LastLines:
    """The last lines of this node's rank that failed; `show` gets them, once, when the gang has failed because of it."""

    def __init__(self, node: int, show: Callable[[str], None]) -> None:
        self._node = node
        self._show = show
        self._text = ""
        self._blamed: int | None = None  # the node of the gang's failure, as far as it is known

    def note(self, log_dir: str, cause: Cause | None) -> None:
        """Take the failure of this node, before its logs are removed."""
        if cause is None or cause.rank is None or cause.local_rank is None:
            return
        lines = _last_lines(worker_folder(log_dir, cause.local_rank))
        if lines:
            title = f"[torchrun node {self._node}] the last lines of rank {cause.rank}, which has failed:\n"
            self._text = title + "".join(f"[rank {cause.rank}] {line}\n" for line in lines)
        self.blame(self._blamed)

    def blame(self, node: int | None) -> None:
        """Take the news on which node the gang's failure was."""
        self._blamed = node
        if node == self._node and self._text:
            text, self._text = self._text, ""
            self._show(text)

    def begin(self) -> None:
        """Forget what was before."""
        self._text, self._blamed = "", None


def _last_lines(folder: str) -> list[str]:
    """Return the end of a worker's stderr and, where that is short, before it the end of its stdout."""
    ends = {name: read_end(os.path.join(folder, f"{name}.log")) for name in ("stdout", "stderr")}
    stdout, stderr = (text.split("\n") if text else [] for text in ends.values())
    stderr = stderr[-_LINES:]
    return stdout[len(stdout) - min(len(stdout), _LINES - len(stderr)) :] + stderr
