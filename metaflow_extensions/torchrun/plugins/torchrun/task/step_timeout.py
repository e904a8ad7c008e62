"""The step's ``@timeout``: a gang enforces it on all its nodes, by the control node's clock, in place of Metaflow's alarm.

Metaflow's handler raises wherever the main thread is, and puts the stack there into its headline
(`TimeoutDecorator` in ``metaflow/plugins/timeout_decorator.py``, 2.19). It has none on a control node.

On Kubernetes, AWS Batch and Argo Workflows Metaflow also makes ``@timeout`` the time limit of the pod or job
(`get_run_time_limit_for_task`, 2.19). That counts from the start of the pod, so it would always end first, and with a
SIGKILL. So there the gang ends before the pod, by the time that the workers may take to save.
"""

from __future__ import annotations

import time
from typing import Any

from ..compat.steps import is_local
from ..gang.policy import Rules
from ..machine.pods import age_s


def time_limit(timeout_s: float, began_at: float, grace_s: float) -> dict[str, Any]:
    """Return a gang's rules for a step whose ``@timeout`` has `timeout_s`; `began_at` is its begin, in monotonic seconds."""
    text = f"longer than the step's @timeout of {timeout_s:g} s allows"
    if is_local():
        return {"deadline": began_at + timeout_s, "longer": text}
    earlier_s = began_at - min(began_at, time.monotonic() - age_s())  # the pod's age may not be known
    if earlier_s > timeout_s:  # it would have been killed: this is not its age
        earlier_s = 0.0
    kept_s = min(Rules(grace_s=grace_s).stop_s, timeout_s / 4)
    text += f" (it counts from the start of the pod or container, {earlier_s:.0f} s before the gang's; "
    text += f"the last {kept_s:.0f} s are left for saving)"
    return {"deadline": began_at - earlier_s + timeout_s - kept_s, "longer": text}
