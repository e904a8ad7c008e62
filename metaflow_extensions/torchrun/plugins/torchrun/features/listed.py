"""The list of all features. A launch works without any of them: remove one here, and the rest stays as it is.

Only the modules that put a gang together import it (`decorator`, `gang_of_one`), and those that show one
(`show.commands`, `show.gang_card`).
"""

from __future__ import annotations

from ..node.watchers import Feature
from .functions.feature import Functions
from .hangs.feature import Hangs
from .outputs.feature import Outputs
from .progress.feature import Progress
from .reach.feature import Reach
from .stacks.feature import Stacks
from .usage.feature import Usage
from .warm.feature import Warm

FEATURES: tuple[Feature, ...] = (
    Functions(),
    Outputs(),
    Reach(),
    Hangs(),
    Stacks(),
    Progress(),
    Usage(),
    Warm(),
)  # fmt: skip
