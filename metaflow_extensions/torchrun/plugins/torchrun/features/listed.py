"""The one list of features: what is not in it, a launch does without.

Only `decorator` and `gang_of_one`, which wire a gang, import it.
"""

from __future__ import annotations

from ..node.watchers import Feature
from .progress.feature import Progress
from .usage.feature import Usage
from .warm.feature import Warm

FEATURES: tuple[Feature, ...] = (
    Progress(),
    Usage(),
    Warm(),
)  # fmt: skip
