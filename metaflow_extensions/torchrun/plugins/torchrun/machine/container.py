"""How old this pod or container is."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from .processes import find

# containerd, CRI-O and Docker write this file anew for each pod, before its image is pulled, and mount it.
_MADE_WITH_IT = "/etc/hostname"


def age_s(made_with_it: str = _MADE_WITH_IT, first_process: int = 1) -> float:
    """Return the age of this pod or container in seconds; 0 where the system does not say."""
    ages = [0.0]
    if (first := find(first_process)) is not None:
        ticks = int(first.began) / os.sysconf("SC_CLK_TCK")
        ages.append(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
    with suppress(OSError):
        if os.path.ismount(made_with_it):  # else it is the image's
            ages.append(time.time() - os.stat(made_with_it).st_mtime)
    return max(ages)
