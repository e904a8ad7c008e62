"""What a supervisor leaves behind if it is killed, as it tells its guardian."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

AGENT_VARIABLE = "TORCHRUN_AGENT_PID"
"""The agent is the first Python of a launch and puts its pid there, so that its children know that they are workers."""


class Estate(NamedTuple):
    """What a supervisor leaves behind if it is killed now."""

    agent: int | None = None  # its pid; the kernel sends it SIGTERM, and it stops its workers
    grace_s: float = 0.0  # time of the workers after SIGTERM
    pipes: str | None = None  # the folder of the pipes to which agent and workers write
    folders: Sequence[str] = ()  # to remove


def tell(file: int, estate: Estate) -> None:
    """Tell the guardian what there is now; whole, since a pipe takes so much at once."""
    with suppress(OSError):  # somebody has killed the guardian, or stopped it for long
        os.write(file, json.dumps(estate).encode() + b"\n")
