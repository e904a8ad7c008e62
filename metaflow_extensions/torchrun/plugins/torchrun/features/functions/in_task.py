"""Functions as entrypoints: every rank calls one; its value or exception comes back to the task."""

from __future__ import annotations

from ...errors import TorchrunConfigError
from ...launch.services import InTask, RunCall, Service
from .call import FunctionCall


class Functions(InTask):
    """Functions as entrypoints."""

    def service(self, call: RunCall) -> Service | None:
        """Return the call, where the entrypoint is a function."""
        run = call.settings
        if not callable(run.entrypoint):
            if run.process_group or run.gather:
                said = f"process_group={run.process_group!r}" if run.process_group else f"gather={run.gather!r}"
                raise TorchrunConfigError(
                    f"run({said}) is for functions; a script makes its process group and stores its results itself."
                )
            return None
        for name, is_set in (("module", run.module), ("no-python", "no-python" in run.options)):
            if is_set:
                raise TorchrunConfigError(
                    f"{name} says how to run a script, but the entrypoint is a function; remove it."
                )
        store = call.store if call.num_nodes > 1 else None  # a gang of one has its values itself
        arguments, group = run.entrypoint_args, run.process_group
        return FunctionCall(run.entrypoint, arguments, group, run.gather, store)


PART = Functions()
