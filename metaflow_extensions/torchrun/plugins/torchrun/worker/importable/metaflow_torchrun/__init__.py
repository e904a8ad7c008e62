"""``from metaflow_torchrun import report``: tells how far a training has come.

All workers of a launch can import this on every backend: `supervisor.command` puts this folder on their path, and Metaflow
ships it for the flow's own file (`decorator.add_to_package`). Elsewhere it comes with the installed package. It needs the
standard library only, and a worker imports it together with nothing else of this extension.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import SupportsFloat

__all__ = ["report"]

_EXACT = 2**53  # up to there a float is exact


def report(
    step: SupportsFloat | None = None,
    total: SupportsFloat | None = None,
    *,
    seconds: SupportsFloat | None = None,
    **values: SupportsFloat | None,
) -> None:
    """Report how far this rank has come, and values such as the loss.

    The log, the card, ``torchrun show`` and ``result.metrics`` show them. Outside of a launch of `@torchrun` it does
    nothing. A value that is no number, or a file that can't be written, is a warning, and raises no error.

    Parameters
    ----------
    step : int, optional
        The step that this rank has done. Each rank should report it; then a slow rank is named.
    total : int, optional
        The number of steps, for the time that is left. Steps may count from 0 or from 1.
    seconds : float, optional
        The rank's own time for this step, without the time that it waits for other ranks, in seconds.
    **values : float, optional
        Values by name, such as ``loss=0.2``. Only those of rank 0 are shown, and at most 20 names. A tensor of one
        element is read as by ``.item()``, which waits for its GPU. None is left out.

    Examples
    --------
    >>> report(step=3, total=100, loss=0.2)
    >>> report(3, 100, **{"val/loss": 0.3})
    """
    path = os.environ.get("TORCHRUN_METRICS")
    if not path:
        return
    problems: list[str] = []
    numbers = _numbers({"step": step, "total": total, "seconds": seconds, **values}, problems)
    try:
        # Opened each time: a fork needs no care then. One write to a file that is appended to stays one line.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(file, (json.dumps(numbers) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        problems.append(f"metaflow_torchrun.report could not write: {error}")
    for text in problems:  # Python shows each once for each line of the user's code
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # `python -W error` makes an error of it, which would end the training
            sys.stderr.write(f"{text}\n")


def _numbers(given: dict[str, SupportsFloat | None], problems: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in given.items():
        try:
            if value is not None:
                item = getattr(value, "item", None)  # of a tensor, which warns where it becomes a float by itself
                plain = value if item is None else item()
                number = float(plain)  # raises for an int that none can hold
                found[name] = plain if type(plain) is int and abs(plain) <= _EXACT else number
        except Exception as error:  # whatever the user's type raises, as a tensor of many elements does
            problems.append(f"metaflow_torchrun.report leaves {name!r} out, since it is no number: {error}")
    return found
