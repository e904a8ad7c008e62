"""The hang section of the gang's page: the user's own frames of each stack, and which ranks to look at first. Pure.

Its input is the stored result of `keep.HangKeeper.record`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...elements.model import Block, Code, Part, Sentence
from ...gang.texts import names
from ...records.on_page import OnPage
from ...records.summary import Summary

_WHAT = (
    "The ranks of launch {} when it hung: your own frames of each stack, the innermost first. "
    "torchrun show --json has more of each stack."
)


class HangOnPage(OnPage):
    """Where the ranks were in the last hang."""

    after = "outcome"

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return the section, if a launch has hung; older versions have kept nothing."""
        if not kept:
            return ()
        blocks = [
            Block(f"{names(each['ranks'], 'Rank')}: {each['where']}", (Code(each["short"] or each["text"]),))
            for each in kept["stacks"]
            if each["text"]
        ]
        return (Sentence(_WHAT.format(kept["launch"])), *blocks)

    def marks(self, kept: Any, summary: Summary) -> Mapping[int, str]:
        """Return the ranks to look at first, if the hang was the end."""
        if not kept or not kept["is_last"] or summary.outcome != "failed" or summary.launch != kept["launch"]:
            return {}
        return dict.fromkeys(kept["first"], "look here first")


PART = HangOnPage()
