"""The command of stacks; the page shows none."""

from __future__ import annotations

from ...records.on_page import OnPage
from .command import COMMAND


class StacksOnPage(OnPage):
    """Whoever can write the datastore may ask what all ranks are doing."""

    command = COMMAND


PART = StacksOnPage()
