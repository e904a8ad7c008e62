"""What a gang's page shows of outputs, and their command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...elements.model import Facts, Part
from ...gang.texts import counted, size_text
from ...records.on_page import OnPage
from ...records.summary import Summary
from .command import COMMAND

_SHOWN_LAUNCHES = 20  # the last, on a page


class OutputsOnPage(OnPage):
    """The outputs of all launches."""

    after = "nodes"
    command = COMMAND

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return how much each launch has stored."""
        rows = []
        for launch, nodes in list((kept or {}).items())[-_SHOWN_LAUNCHES:]:
            files, size = (sum(each[name] for each in nodes.values()) for name in ("files", "size"))
            rows.append((f"launch {launch}", f"{counted(files, 'file')}, {size_text(size)}"))
        return (Facts(tuple(rows)),) if rows else ()


PART = OutputsOnPage()
