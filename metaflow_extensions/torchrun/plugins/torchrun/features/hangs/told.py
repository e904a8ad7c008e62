"""What a node tells of a launch that hangs."""

from __future__ import annotations

from dataclasses import dataclass

KIND = "hang"  # of the cause
# The nodes may take this long to collect the stacks of their workers.
DIAGNOSTICS_S = 15.0


@dataclass(frozen=True)
class Diagnostics:
    """The places in the code of one node's workers when the launch hung."""

    host: str  # the node's host name
    file: str | None  # has all stacks; None if they could not be written
    where: dict[int, str]  # global rank -> its place in the code, in one line
