"""`TorchrunSingleNodeMultiGPU`, the sibling of ``current.torch`` for steps of a single node.

Metaflow imports this module whenever it is imported itself, so each method imports what only it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metaflow import current

from .result import TorchrunResult
from .run_arguments import Runner

if TYPE_CHECKING:
    from .gang.view import GangView
    from .show.gang_part import GangPart
    from .task.cards import Cards
    from .task.gang_store import GangStore

# Metaflow's generator of stubs looks at what modules have imported, and at what they name here (2.19). This one is the
# type of `current.torch`.
_addl_stubgen_modules = [f"{__package__}.executor"]


class TorchrunSingleNodeMultiGPU(Runner):
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node for each launch; several threads may launch at
    once. Its card shows the last launch of this object.
    """

    def __init__(self) -> None:
        from .compat.datastore import datastore_here
        from .compat.linux import require_linux

        require_linux(type(self).__name__)
        self._flow_datastore = datastore_here()
        self._cards: Cards | None = None  # of the task

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def launched(self, given: dict[str, Any]) -> TorchrunResult[Any]:
        """Run a launch in a gang of one node."""
        from .compat.datastore import values_of_running_flow
        from .compat.renamed import check
        from .errors import TorchrunConfigError
        from .executor import TorchrunExecutor
        from .machine.accelerators import this_machine
        from .settings import parse_settings
        from .task.cards import Cards
        from .task.gang_store import GangStore
        from .task.join import LOOPBACK, begin_gang

        check()
        if current.get("torch") is not None:
            raise TorchrunConfigError(
                "TorchrunSingleNodeMultiGPU is for steps without @torchrun, whose nodes run one job: call current.torch.run. "
                "Nodes that launch by themselves need @parallel only."
            )
        settings, machine = parse_settings({}, ""), this_machine()
        member = begin_gang(settings)
        store: GangStore | None = None
        error: BaseException | None = None
        try:
            self._cards = self._cards or Cards(self._flow_datastore)
            store = GangStore(member, (), self._cards, None)
            values = values_of_running_flow()
            return TorchrunExecutor(member, LOOPBACK, machine, settings, store=values).launched(given)
        except BaseException as caught:
            error = caught
            _tell(caught, member)
            raise
        finally:
            member.leave(error)
            if store is not None:
                store.close(error)

    def _part(self, names: tuple[str, ...]) -> GangPart:
        from .show.gang_part import GangPart

        return GangPart(names, self._present)

    def _present(self) -> GangView | str:
        return "No launch has begun yet." if self._cards is None else self._cards.shown()


def _tell(error: BaseException, member: Any) -> None:
    """Print an error that ends a launch, as a gang's task does."""
    from .errors import TorchrunPreempted
    from .task.console import hurry
    from .task.report import end_with, print_errors_ourselves, report

    if isinstance(error, TorchrunPreempted | KeyboardInterrupt):
        hurry()
        member.link.send("hurry")
    print_errors_ourselves(in_task=True)
    end_with(error, report(error, member.node, shared=True, known=False, stands_above=lambda _: member.shows_output))
