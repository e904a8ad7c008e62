"""A gang of one node for `TorchrunSingleNodeMultiGPU`, in a step without ``num_parallel``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from metaflow import current

from .compat.cards import datastore_here
from .compat.datastore import values_of_running_flow
from .compat.renamed import check
from .elements.model import Sentence
from .errors import GangError, TorchrunError, TorchrunPreempted
from .events import Event, Subscriber
from .executor import Context, TorchrunExecutor
from .gang.cause import rename_node
from .gang.view import GangView
from .gang.wire import Plain
from .logs.console import hurry, to_log
from .machine.accelerators import Machine, this_machine
from .result import TorchrunResult
from .settings import DEFAULTS, StepSettings, parse_settings
from .show.gang_part import GangPart
from .task.cards import Cards
from .task.gang_store import GangStore
from .task.join import LOOPBACK, join_alone, rules_of
from .task.link import Link
from .task.member import Member
from .task.report import end_with, print_errors_ourselves, report
from .task.spares import starts_of


class GangOfOne:
    """Runs launches, also of several threads at once, each in a gang of its own; cards show the last one."""

    def __init__(self) -> None:
        self._flow_datastore = datastore_here()
        self._cards: Cards | None = None  # of the task
        self._has_parts = False  # whether the step has asked for any
        self._starts: Plain | None = None  # from the first launch that asks for spares on
        self._idle: deque[Link] = deque()  # to supervisors that stay, and that no launch uses

    def card(self, parts: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's card, which show the last launch."""
        self._has_parts = True
        return GangPart(parts, self._present)

    def _present(self) -> GangView | Sentence:
        return Sentence("No launch has begun yet.") if self._cards is None else self._cards.shown()

    def run(self, **options: Any) -> TorchrunResult[Any]:
        """Run a launch to its end; the arguments are those of `TorchrunExecutor.run`, all by name."""
        check()
        settings = parse_settings(DEFAULTS, None)
        about: dict[str, Any] = {}
        machine = this_machine()
        self._begin_warm(machine, options)
        member = self._join(settings, partial(_log, about))
        store: GangStore | None = None
        error: BaseException | None = None
        try:
            store = self._follow(member, about)
            has_spares, values = self._starts is not None, values_of_running_flow()
            context = Context(member, LOOPBACK, machine, settings, store=values, has_spares=has_spares)
            executor = TorchrunExecutor(context)
            run: Callable[..., TorchrunResult[Any]] = executor.run  # the caller knows which overload applies
            return run(**options)
        except BaseException as caught:
            error = caught
            if isinstance(caught, TorchrunPreempted | KeyboardInterrupt):
                hurry()
                member.link.send("hurry")
            if isinstance(caught, TorchrunError) and member.gang_knows(caught) and current.get("is_parallel"):
                rename_node(caught, current.parallel.node_index)
            print_errors_ourselves(in_task=True)
            end_with(
                caught,
                report(caught, member.node, shared=True, known=False, stands_above=lambda _: member.shows_output),
            )
            raise
        finally:
            member.leave(error)
            if store is not None:
                store.close()
            if error is not None and self._cards is not None:
                self._cards.make_last()
            if member.link.stays and member.link.end is None:
                self._idle.append(member.link)

    def _join(self, settings: StepSettings, emit: Subscriber) -> Member:
        """Join a new gang; from the first launch with spares on, its supervisor stays with these."""
        starts = self._starts  # another thread may set it meanwhile
        link = self._pop_idle() if starts is not None else None
        member = join_alone(settings, emit, rules_of(settings), {"starts": starts}, link)
        if starts is not None and link is None:
            member.link.stays = True
            weakref.finalize(self, member.link.end_staying)
        return member

    def _pop_idle(self) -> Link | None:
        with suppress(IndexError):  # other threads take them, too
            while idle := self._idle.popleft():
                idle.read()
                if idle.end is None:
                    return idle
                if idle.is_forked:
                    raise GangError(
                        "run was called in a process that was forked from one that had launched with warm. A "
                        "fork can't use its spares: launch there, or make another TorchrunSingleNodeMultiGPU here."
                    )
        return None

    def _begin_warm(self, machine: Machine, options: Mapping[str, Any]) -> None:
        """Start spare processes for this launch and later ones, if the call asks for them with `warm`."""
        if self._starts is None and options.get("warm") is not None:
            asked = {name: options.get(name) for name in ("warm", "nproc_per_node")}
            settings = parse_settings({**DEFAULTS, **asked}, None)
            self._starts = starts_of(settings, machine, None)

    def _follow(self, member: Member, about: dict[str, Any]) -> GangStore:
        """Show the launch on the task's cards; of a launch within a gang only where the step asks for it."""
        if self._cards is None:
            self._cards = Cards(self._flow_datastore, with_ours=current.get("torch") is None)
        self._cards.has_parts = self._has_parts and current.get("torch") is None
        return GangStore(member, about, self._cards, registry=None)


def _log(about: dict[str, Any], event: Event) -> None:
    if event.kind == "command":
        about["command"] = event.text.removeprefix("runs: ")
    to_log(event, num_nodes=1)
