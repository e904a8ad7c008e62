"""A gang of one node for `TorchrunSingleNodeMultiGPU`, in a step without ``num_parallel``."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from metaflow import current

from .channel.client import ControlClient
from .channel.join import LOOPBACK, join_alone, join_alone_again, rules_of
from .compat.datastore import values_of_running_flow
from .compat.renamed import check
from .elements.model import Sentence
from .errors import GangError, TorchrunError, TorchrunPreempted
from .events import Event, Subscriber
from .executor import Context, TorchrunExecutor
from .feature_list import in_task, on_page
from .gang.cause import rename_node
from .gang.keepers import Plain
from .gang.member import Member
from .launch.services import starts_of
from .logs.console import hurry, to_log
from .machine.accelerators import Machine, this_machine
from .records.snapshot import Snapshot
from .result import TorchrunResult
from .settings import DEFAULTS, StepSettings, parse_settings
from .show.live_card import GangPart, LiveCard, this_task
from .task.report import end_with, print_errors_ourselves, report
from .task.step_timeout import StepTimeout


class GangOfOne:
    """Runs launches, also of several threads at once, each in a gang of its own; cards show the last one."""

    def __init__(self) -> None:
        self._live_card: LiveCard | None = None  # of the last launch
        self._has_parts = False  # whether the step has asked for any
        self._starts: Plain | None = None  # from the first launch that asks for spares on
        self._owner: int | None = None  # the process whose they are
        self._idle: deque[ControlClient] = deque()  # with supervisors that stay, and that no launch uses

    def card(self, parts: tuple[str, ...]) -> GangPart:
        """Return parts of the gang's card, which show the last launch."""
        self._has_parts = True
        return GangPart(parts, self._shown, this_task, on_page())

    def _shown(self) -> Snapshot | Sentence:
        return Sentence("No launch has begun yet.") if self._live_card is None else self._live_card.for_part()

    def run(self, **options: Any) -> TorchrunResult[Any]:
        """Run a launch to its end; the arguments are those of `TorchrunExecutor.run`, all by name."""
        self._refuse_in_fork()
        check()
        settings = parse_settings(DEFAULTS, None)
        about: dict[str, Any] = {}
        machine = this_machine()
        self._begin_warm(machine, options)
        member, channel = self._join(settings, partial(_log, about))
        live_card = self._follow(channel, about, member)
        timeout = StepTimeout(settings.grace_s)
        timeout.tell(member)
        error: BaseException | None = None
        try:
            has_spares, store = self._starts is not None, values_of_running_flow()
            context = Context(
                member, LOOPBACK, machine, settings, store=store, has_spares=has_spares, features=in_task()
            )
            executor = TorchrunExecutor(context)
            run: Callable[..., TorchrunResult[Any]] = executor.run  # the caller knows which overload applies
            return run(**options)
        except BaseException as caught:
            error = caught
            if isinstance(caught, TorchrunPreempted | KeyboardInterrupt):
                hurry()
                channel.hurry()
            if isinstance(caught, TorchrunError) and member.gang_knows(caught):
                rename_node(caught, current.parallel.node_index if current.get("is_parallel") else None)
            print_errors_ourselves(in_task=True)
            end_with(
                caught,
                report(caught, member.node, shared=True, known=False, stands_above=lambda _: member.shows_output),
            )
            raise
        finally:
            timeout.end()
            member.leave(error)
            if error is None:
                live_card.settle()
            else:
                live_card.make_last()
            if channel.stays:  # last: the card has asked it
                self._idle.append(channel)

    def _refuse_in_fork(self) -> None:
        """Raise in a fork of the process that has the spares: their supervisor is deaf to it."""
        if self._owner not in (None, os.getpid()):
            raise GangError(
                f"run was called in process {os.getpid()}, which was forked from process {self._owner} after that had "
                "launched with warm. A fork can't use its spares: launch there, or make another "
                "TorchrunSingleNodeMultiGPU here."
            )

    def _join(self, settings: StepSettings, emit: Subscriber) -> tuple[Member, ControlClient]:
        """Join a new gang; from the first launch with spares on, its supervisor stays with these."""
        if (idle := self._pop_idle()) is not None:
            return join_alone_again(idle, settings, emit, rules_of(settings))
        starts = self._starts  # another thread may set it meanwhile
        member, channel = join_alone(settings, emit, rules_of(settings), {"starts": starts})
        if starts is not None:
            channel.stays = True
            weakref.finalize(self, channel.end)
        return member, channel

    def _pop_idle(self) -> ControlClient | None:
        with suppress(IndexError):  # other threads take them, too
            while (idle := self._idle.popleft()).is_gone:
                pass
            return idle
        return None

    def _begin_warm(self, machine: Machine, options: Mapping[str, Any]) -> None:
        """Start spare processes for this launch and later ones, if the call asks for them with `warm`."""
        if self._starts is None and options.get("warm") is not None:
            asked = {name: options.get(name) for name in ("warm", "nproc_per_node")}
            settings = parse_settings({**DEFAULTS, **asked}, None)
            self._starts = starts_of(in_task(), settings, machine, None)
            self._owner = os.getpid()

    def _follow(self, gang: ControlClient, about: dict[str, Any], member: Member) -> LiveCard:
        """Show the launch on the task's cards; of a launch within a gang only where the step asks for it."""
        is_alone = current.get("torch") is None
        live_card = LiveCard(
            lambda: gang.snapshot(about),
            lambda: gang.counts()[0],
            gang.in_background,
            lambda: member.runs_own_code,
            with_ours=is_alone,
            pages=on_page(),
        )
        if is_alone and self._has_parts:
            live_card.follow_parts()
        self._live_card = live_card
        return live_card


def _log(about: dict[str, Any], event: Event) -> None:
    if event.kind == "command":
        about["command"] = event.text.removeprefix("runs: ")
    to_log(event, num_nodes=1)
