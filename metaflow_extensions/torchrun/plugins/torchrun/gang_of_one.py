"""A gang of one node for `TorchrunSingleNodeMultiGPU`, in a step without ``num_parallel``."""

from __future__ import annotations

from functools import partial
from typing import Any

from metaflow import current

from .compat.datastore import datastore_here, values_of_running_flow
from .compat.renamed import check
from .errors import TorchrunError, TorchrunPreempted
from .events import Event
from .executor import Context, TorchrunExecutor
from .gang.cause import rename_node
from .gang.view import GangView
from .machine.accelerators import this_machine
from .result import TorchrunResult
from .settings import parse_settings
from .show.gang_part import GangPart
from .task.cards import Cards
from .task.console import hurry, to_log
from .task.gang_store import GangStore
from .task.join import LOOPBACK, begin_gang
from .task.report import end_with, print_errors_ourselves, report


class GangOfOne:
    """Runs launches, also of several threads at once, each in a gang of its own; cards show the last one."""

    def __init__(self) -> None:
        self._flow_datastore = datastore_here()
        self._cards: Cards | None = None  # of the task
        self._has_parts = False  # whether the step has asked for any

    def card(self, parts: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's card, which show the last launch."""
        self._has_parts = True
        return GangPart(parts, self._present)

    def _present(self) -> GangView | str:
        return "No launch has begun yet." if self._cards is None else self._cards.shown()

    def run(self, given: dict[str, Any]) -> TorchrunResult[Any]:
        """Run a launch to its end; `given` has the arguments of `Runner.run` by name."""
        check()
        settings, machine = parse_settings({}, ""), this_machine()
        about: dict[str, Any] = {}
        member = begin_gang(settings, partial(_log, about))
        store: GangStore | None = None
        error: BaseException | None = None
        try:
            # Of a launch within a gang, the task's cards show it only where the step asks for it.
            is_alone = current.get("torch") is None
            self._cards = self._cards or Cards(self._flow_datastore, with_ours=is_alone)
            self._cards.has_parts = self._has_parts and is_alone
            store = GangStore(member, about, self._cards, registry=None)
            context = Context(member, LOOPBACK, machine, settings, store=values_of_running_flow())
            return TorchrunExecutor(context).launched(given)
        except BaseException as caught:
            error = caught
            if isinstance(caught, TorchrunPreempted | KeyboardInterrupt):
                hurry()
                member.link.send("hurry")
            if isinstance(caught, TorchrunError) and member.gang_knows(caught) and current.get("is_parallel"):
                rename_node(caught, current.parallel.node_index)
            print_errors_ourselves(in_task=True)
            said = report(caught, member.node, shared=True, known=False, stands_above=lambda _: member.shows_output)
            end_with(caught, said)
            raise
        finally:
            member.leave(error)
            if store is not None:
                store.close()
            if error is not None and self._cards is not None:
                self._cards.make_last()


def _log(about: dict[str, Any], event: Event) -> None:
    if event.kind == "command":
        about["command"] = event.text.removeprefix("runs: ")
    to_log(event, num_nodes=1)
