"""Which backend a step goes to: `plan.py`, which the test writes, says so."""

import plan
from metaflow import batch, kubernetes


def where(function):
    """Send a step to the backend under test; without one, ``--with`` does."""
    if plan.KUBERNETES is not None:
        return kubernetes(**plan.KUBERNETES)(function)
    return batch(**plan.BATCH)(function) if plan.BATCH is not None else function
