"""What a gang's page shows of outputs, and their command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...elements.model import Facts, Part
from ...gang.texts import counted, size_text
from ...records.on_page import OnPage
from ...records.summary import Summary
from .command import COMMAND

_SHOWN_LAUNCHES, _SHOWN_FILES = 20, 5  # the last launches, and the first files of each


class OutputsOnPage(OnPage):
    """The outputs of all launches."""

    after = "nodes"
    command = COMMAND

    def parts(self, kept: Any, summary: Summary) -> Sequence[Part]:
        """Return what each launch has stored."""
        rows = []
        for launch, nodes in list((kept or {}).items())[-_SHOWN_LAUNCHES:]:
            files, size = (sum(each[name] for each in nodes.values()) for name in ("files", "size"))
            # Records of older versions have no names.
            known = [name for each in nodes.values() for name in each.get("names", ())][:_SHOWN_FILES]
            more = ["…"] if len(known) < files else []
            named = f": {', '.join([*known, *more])}" if known else ""
            rows.append((f"launch {launch}", f"{counted(files, 'file')}, {size_text(size)}{named}"))
        return (Facts(tuple(rows)),) if rows else ()


PART = OutputsOnPage()
