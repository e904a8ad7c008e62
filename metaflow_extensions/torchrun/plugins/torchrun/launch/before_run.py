"""What runs before the workers, once on each node: ``run(before_run=...)``.

The gang runs it as a launch of its own. So all nodes begin together, all stop when a command fails on one, and no
worker starts before the last command has ended. Here is what that launch is, and how its failure is told.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ..errors import LaunchFailed
from ..gang.cause import retold
from .command import SCRIPTS
from .commands import beside_flow
from .spec import LaunchSpec

# What runs the commands of a node; it stands where the agent of other launches stands.
_RUNNER = os.path.join(SCRIPTS, "command_runner.py")


def before_spec(spec: LaunchSpec, commands: Sequence[tuple[str, ...]], flow_dir: str | None) -> LaunchSpec:
    """Return the launch that runs `commands` on each node, in the folder and with the variables of `spec`."""
    found = tuple((beside_flow(words[0], spec.cwd, flow_dir), *words[1:]) for words in commands)
    own = replace(spec, entrypoint=_RUNNER, args=(), module=False, options=(), command=(), source=None, function=None)
    own = replace(own, commands=found, shown_local_ranks=None, outputs=None)
    # All nodes take part, whatever torchrun's own elasticity is to do later.
    return replace(own, max_restarts=0, min_nodes=None)


def as_before_run(error: LaunchFailed) -> LaunchFailed:
    """Return the failure of that launch with words that say what it was; cause and events stay."""
    return retold(error, type(error), "before_run failed, so no worker was started on any node.\n")
