"""What a node tells that can't reach torch's store."""

from __future__ import annotations

from dataclasses import dataclass

KIND = "unreachable"  # of the cause


@dataclass(frozen=True)
class Unreached:
    """What a node tells that can't reach the store."""

    number: int  # of the question
    address: str
    port: int
    why: str
