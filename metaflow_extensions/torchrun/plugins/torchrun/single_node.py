"""`TorchrunSingleNodeMultiGPU`, the sibling of ``current.torch`` for steps of a single node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from metaflow import current

from .border.event_store import gang_content
from .border.live_card import LiveCard, with_task
from .border.step_timeout import StepTimeout
from .card.part import GangPart
from .channel.join import LOOPBACK, join_alone
from .errors import TorchrunError
from .events import Event
from .executor import Context, LaunchOptions, TorchrunExecutor
from .gang.cause import Cause
from .gang.member import Member
from .gang.state import Gang
from .machine.accelerators import this_machine
from .node.console import to_log
from .node.report import end_with, print_errors_ourselves, report
from .result import TorchrunResult
from .settings import DEFAULTS, parse_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

T = TypeVar("T")
_NOTHING = {"said": "No launch has begun yet."}


class TorchrunSingleNodeMultiGPU:
    """Runs torchrun on this machine alone, in a step without ``num_parallel``.

    It is the same machinery as ``current.torch``, with a gang of one node.
    """

    def __init__(self) -> None:
        self._live_card: LiveCard | None = None  # of the last launch
        self._has_parts = False  # whether the step has asked for any

    def card(self, *parts: str) -> GangPart:
        """Return parts of the gang's card as a component, for a card of the step's own.

        It shows the last launch of this object.

        Parameters
        ----------
        *parts : str
            As for `TorchrunExecutor.card`.

        Returns
        -------
        GangPart
            A component for ``current.card.append``.

        Raises
        ------
        TorchrunConfigError
            If there is no such part.
        """
        self._has_parts = True
        return GangPart(parts, self._shown)

    def _shown(self) -> dict[str, Any]:
        return with_task(_NOTHING) if self._live_card is None else self._live_card.for_part()

    @overload
    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: str | os.PathLike[str] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Unpack[LaunchOptions],
    ) -> TorchrunResult[None]: ...

    @overload
    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: Callable[..., T] = ...,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Unpack[LaunchOptions],
    ) -> TorchrunResult[T]: ...

    def run(
        self,
        torchrun_args: Mapping[str, Any] | Sequence[Any] | None = None,
        entrypoint: str | os.PathLike[str] | Callable[..., Any] | None = None,
        entrypoint_args: Mapping[str, Any] | Sequence[Any] | None = None,
        nproc_per_node: int | str | None = None,
        **options: Any,
    ) -> TorchrunResult[Any]:
        """Run a script or a function under torchrun on this machine and wait for its end.

        Parameters
        ----------
        torchrun_args, entrypoint, entrypoint_args, nproc_per_node : optional
            As for `TorchrunExecutor.run`; their order is that of ``metaflow-torchrun`` 0.2.
        **options
            Its other arguments.

        Returns
        -------
        TorchrunResult
            Facts of the launch.

        Raises
        ------
        TorchrunError
            As `TorchrunExecutor.run`.
        """
        settings = parse_settings(DEFAULTS, "TorchrunSingleNodeMultiGPU")
        about: dict[str, Any] = {}
        member, channel = join_alone(settings, partial(_log, about))
        live_card = self._follow(channel.gang, about, member)
        timeout = StepTimeout()
        timeout.tell(member)
        error: BaseException | None = None
        try:
            executor = TorchrunExecutor(Context(member, LOOPBACK, this_machine(), settings))
            run: Callable[..., TorchrunResult[Any]] = executor.run  # which overload is this class's caller's to know
            return run(
                entrypoint, entrypoint_args, nproc_per_node=nproc_per_node, torchrun_args=torchrun_args, **options
            )
        except BaseException as caught:
            error = caught
            if isinstance(caught, TorchrunError) and member.gang_knows(caught) and current.get("is_parallel"):
                rename_node(caught, current.parallel.node_index)
            print_errors_ourselves(in_task=True)
            end_with(caught, report(caught, member.node, shared=True, known=False, live=member.shows_output))
            raise
        finally:
            timeout.end()
            member.leave(error)
            if error is None:
                live_card.settle()
            else:
                live_card.make_last()

    def _follow(self, gang: Gang, about: dict[str, Any], member: Member) -> LiveCard:
        """Show the launch on the task's cards; of a launch within a gang only where the step asks for it."""
        is_alone = current.get("torch") is None
        live_card = LiveCard(
            partial(gang_content, gang, about),
            lambda: gang.history.count,
            lambda: member.runs_own_code,
            with_ours=is_alone,
        )
        if is_alone and self._has_parts:
            live_card.follow_parts()
        self._live_card = live_card
        return live_card


def _log(about: dict[str, Any], event: Event) -> None:
    if event.kind == "command":
        about["command"] = event.text.removeprefix("runs: ")
    to_log(event)


def rename_node(error: TorchrunError, node: int) -> None:
    """Have an error of a gang of one, whose node is 0, speak of the node that it is in the gang around it."""
    if error.cause is None:
        return
    before = Cause.from_dict(error.cause)
    after = replace(before, node=node)
    # Without the first letter, which is large where a sentence begins.
    error.message = error.message.replace(before.who[1:], after.who[1:])
    error.cause = after.as_dict()
