"""Runs the launches of one node, which its task asks for."""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import TorchrunError
from ..gang.cause import Cause
from ..gang.wire import from_plain, to_plain
from .call import Call
from .endings import GivenUp
from .launch import NodeLaunch
from .output import Output
from .side import Side
from .warm import WarmNode


class Launches:
    """The launches of one node, one at a time."""

    def __init__(self, side: Side, output: Output, warm: WarmNode | None) -> None:
        self._side, self._output, self._warm = side, output, warm
        self._launch: asyncio.Task[None] | None = None  # the last one
        self._number = -1  # of the last launch that the task has asked for

    @property
    def runs(self) -> bool:
        """Whether a launch runs."""
        return self._launch is not None and not self._launch.done()

    # --- what the task asks for

    def run(self, number: int, call: dict[str, Any]) -> None:
        """Begin a launch; its end is told in an *ended*."""
        found: Call = from_plain(Call, call, "the call")
        tempfile.tempdir = found.tmp
        self._output.begin(found.writes)
        self._number = number
        launch = NodeLaunch(found, self._side, number, self._writer(found), self._warm)
        self._launch = asyncio.get_running_loop().create_task(self._run(launch, number, self._launch))

    def complete(self, call: dict[str, Any]) -> None:
        """Go on with the call that is complete after the commands."""
        self.end_spares("before_run may have changed what its spare had imported")
        self._side.inbox.put_nowait(from_plain(Call, call, "the call"))

    def give_up(self, number: int, cause: dict[str, Any] | None) -> None:
        """End the launch: the task has left it. It may have done so before it has said *run*."""
        if number != self._number:
            self._side.tell_task("ended", number, {"handled": 0})
            return
        self._side.inbox.put_nowait(GivenUp(None if cause is None else from_plain(Cause, cause, "the cause")))

    def end_spares(self, why: str = "no launch comes any more") -> None:
        """End the spares."""
        if self._warm is not None:
            self._warm.close(why)

    def abort(self) -> None:
        """End the launch, if one runs: its task or its gang is gone."""
        self._side.inbox.put_nowait(GivenUp(None))

    async def close(self) -> None:
        """Wait for the end of a launch that was aborted."""
        if self._launch is not None:
            await self._launch
        self.end_spares()

    # --- one launch

    async def _run(self, launch: NodeLaunch, number: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # the task may have left its launch by a second Ctrl-C, while that was being stopped
            await before
        told: dict[str, Any] = {}
        try:
            told = {"outcome": to_plain(await launch.run())}
        except GivenUp:
            pass
        except TorchrunError as error:
            told = {"error": to_plain(error), "events": error.events, "is_broken": error is self._side.broken}
        except BaseException as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            told = {"error": to_plain(TorchrunError(f"The launch failed by a bug in metaflow-torchrun:\n{text}"))}
        if number == self._number:  # the task may have left this launch, and begun the next one
            self._output.begin(())  # nobody reads what the task would have to write
        self._side.tell_task("ended", number, {**told, "handled": launch.interruptions})  # later ones are the task's

    def _writer(self, call: Call) -> Callable[[str, bytes], bool]:
        # Nodes that share a machine share a terminal: there the control node's lines and these stand side by side.
        sends = call.logs == "all" and not call.shares_machine

        def write(stream: str, lines: bytes) -> bool:
            if lines and sends:
                self._side.lines(stream, lines.decode())
            return self._output.write(stream, lines)

        return write
