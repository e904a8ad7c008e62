"""``from metaflow_torchrun import report, stopping``: tells how far a training has come, and when all ranks stop.

All workers of a launch can import this on every backend: `supervisor.command` puts this folder on their path, and Metaflow
ships it for the flow's own file (`decorator.add_to_package`). Elsewhere it comes with the installed package. It needs the
standard library only, and a worker imports it together with nothing else of this extension.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import warnings
from typing import SupportsFloat

__all__ = ["report", "stopping"]

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


# --- one agreed stop --------------------------------------------------------------------------------

_WAIT = 2**63  # an order, see `supervisor.calls`
_WAIT_S = 0.002
_pages: list[memoryview | None] = []  # this worker's, from its first call on


def stopping() -> bool:
    """Return whether this is the call at which all ranks stop: save, and leave the loop.

    Call it once in each step, on every rank. It costs less than a microsecond and needs no collective. When the gang is
    told to end, as before a spot loss, or by ``python flow.py torchrun stop``, all ranks get True at the same call: the
    first one that all can still reach. A rank that has called it once gets no preemption signal. What is not over
    within ``grace_s`` seconds after a preemption is killed; after the command there is no limit. Outside of a launch of
    `@torchrun`, and in a process that a worker has forked, it is False.

    Examples
    --------
    >>> for step in range(100):
    ...     if stopping():
    ...         save(step)
    ...         break
    """
    if not _pages:
        _pages.append(_open_page())
    if (page := _pages[0]) is None:
        return False
    call = page[0] = page[0] + 1
    while (order := page[1]) == _WAIT:
        page[2] = call
        time.sleep(_WAIT_S)
    return 0 < order <= call


def _open_page() -> memoryview | None:
    try:
        with open(os.environ["TORCHRUN_CALLS"], "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
    except (KeyError, OSError, ValueError):  # of a launch that is over, which a process may outlive; a full disk
        return None


def _forget() -> None:
    _pages[:] = [None]


os.register_at_fork(after_in_child=_forget)
