"""How many bytes this machine, or this container, has received and sent by its network.

Linux counts what goes by IP. What goes past it (InfiniBand, AWS's EFA) is not in these numbers.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ...machine.processes import read


class Traffic(NamedTuple):
    """Bytes since the interfaces are there."""

    received: int
    sent: int


def traffic(root: str = "/") -> Traffic | None:
    """Return what has gone by all interfaces but the loopback; None where that is not known.

    Bridges and the like pass on what a real interface has counted. So where there are real ones, they alone count.
    """
    # Two lines of headings, then lines as "  eth0: BYTES PACKETS …": eight numbers received, and eight sent.
    lines = (line.rpartition(":") for line in read(os.path.join(root, "proc/net/dev")).splitlines()[2:])
    found = {name.strip(): numbers.split() for name, _, numbers in lines}
    found.pop("lo", None)
    real = {name for name in found if os.path.exists(os.path.join(root, "sys/class/net", name, "device"))}
    counted = [found[name] for name in real or found if len(found[name]) > 8]
    return Traffic(sum(int(each[0]) for each in counted), sum(int(each[8]) for each in counted)) if counted else None
