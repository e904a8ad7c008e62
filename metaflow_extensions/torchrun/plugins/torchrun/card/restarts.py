"""The failures after which the gang has started again, each with its traceback, in HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..gang.texts import duration
from .drawing import cause_detail, cause_facts, one_line, told

_MAX_SHOWN = 5
_MAX_LINE, _MAX_DETAIL = 300, 6000  # characters


def restarts_block(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return what is known of each restart, the newest first, folded; `reports` are `Report` as plain data."""
    found = [report for report in reports if report["error"] is None and report["cause"] is not None]
    if not found:
        return ""
    shown = "".join(map(_folded, found[: -_MAX_SHOWN - 1 : -1]))
    more = len(found) - _MAX_SHOWN
    left_out = told(f"The causes of {more} earlier restarts are not shown here.") if more > 0 else ""
    return f'<div class="tr-label">Restarts, the newest first</div>{shown}{left_out}'


def _folded(report: Mapping[str, Any]) -> str:
    cause = dict(report["cause"])
    line = str(report["text"]).partition("\n")[0]
    detail = str(cause.get("detail") or "")
    more = len(detail) - _MAX_DETAIL
    if more > 0:
        cause["detail"] = f"… {more} characters are left out here\n{detail[-_MAX_DETAIL:]}"
    title = f"After {duration(report['at_s'])}: {line[:_MAX_LINE]}{'…' if len(line) > _MAX_LINE else ''}"
    return (
        f'<details class="tr-restart"><summary>{one_line(title)}</summary>'
        f"{cause_facts(cause)}{cause_detail(cause)}</details>"
    )
