"""Runs the launches of one node, which its task asks for."""

from __future__ import annotations

import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..channel.link import LinkEnd
from ..errors import TorchrunError
from ..gang.cause import Cause
from ..gang.endings import TimedOut
from ..gang.protocol import Store, to_wire
from ..gang.seat import GivenUp, Seat
from ..gang.wire import from_plain, to_plain
from ..machine.processes import began
from ..node.agent import AgentProcess
from ..node.plan import Plan, Request, WarmStarts
from ..node.supervisor import Completed, Supervisor
from ..node.watchers import Feature
from .output import Output


class Launches:
    """The launches of one node, one at a time, each in a thread of its own; the thread that reads the link calls it."""

    def __init__(
        self,
        link: LinkEnd,
        seat: Seat,
        output: Output,
        send_lines: Callable[[str, str], None],
        features: Sequence[Feature],
        warm: WarmStarts | None,
    ) -> None:
        self._link, self._seat, self._output, self._send_lines = link, seat, output, send_lines
        self._features, self._warm = features, warm
        self._plan: Plan | None = None  # of the last launch
        self._thread: threading.Thread | None = None
        self._awaits_task = False  # whether the launch can't go on without the task

    @property
    def runs_alone(self) -> bool:
        """Whether a launch runs that does not need the task at the moment."""
        return self._thread is not None and self._thread.is_alive() and not self._awaits_task

    # --- what the task asks for

    def run(self, number: int, request: dict[str, Any]) -> None:
        """Begin a launch; its end is told in an *ended*."""
        found: Request = from_plain(Request, request, "the request")
        task = found.task
        if task is not None:
            tempfile.tempdir = task.tmp
            self._output.begin(task.writes)
        features = [each for each in self._features if each.name in found.features]
        self._plan = plan = Plan.of(found, write=self._writer(found), warm_node=self._warm, with_features=features)
        self._awaits_task = False
        args = number, plan, self._thread
        self._thread = threading.Thread(target=self._run, args=args, name="torchrun-launch", daemon=True)
        self._thread.start()

    def complete(self, request: dict[str, Any]) -> None:
        """Go on with the plan that is complete after the commands."""
        found: Request = from_plain(Request, request, "the request")
        if self._warm is not None and found.warm == "workers":
            # A spare worker would lack what is there now. A spare agent sees for itself whether torch has changed.
            self._warm.renew()
        assert self._plan is not None
        self._awaits_task = False
        self._plan = replace(self._plan, spec=found.spec, facts=found.facts)
        self._seat.inbox.put(Completed(self._plan))

    def give_up(self, cause: dict[str, Any] | None) -> None:
        """End the launch: the task has left it."""
        self._seat.give_up(None if cause is None else from_plain(Cause, cause, "the cause"))

    def end_spares(self) -> None:
        """End the spares: no launch comes any more."""
        if self._warm is not None:
            self._warm.close()

    def abort(self) -> None:
        """End the launch, if one runs: the task is gone."""
        self._seat.give_up(None)

    def close(self) -> None:
        """Wait for the end of a launch that was aborted, and remove what its task would have removed."""
        if self._thread is not None:
            self._thread.join()
        self.end_spares()

    def remove_folders(self) -> None:
        """Remove the folders of a task that is gone."""
        for folder in () if self._plan is None else self._plan.folders:
            shutil.rmtree(folder, ignore_errors=True)

    # --- in the launch's thread

    def _run(self, number: int, plan: Plan, before: threading.Thread | None) -> None:
        if before is not None:  # the task may have left its launch by a second Ctrl-C, while that was being stopped
            before.join()
        told: dict[str, Any] = {}
        try:
            launch = Supervisor(plan, self._seat, number, self._ask_to_complete, self._ask_to_store, self._new_agent)
            told = {"outcome": to_plain(launch.run())}
        except GivenUp:
            pass
        except TorchrunError as error:
            told = {"error": to_plain(error), "events": error.events, "is_broken": error is self._seat.broken}
        except BaseException as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            told = {"error": to_plain(TorchrunError(f"The launch failed by a bug in metaflow-torchrun:\n{text}"))}
        unread = [each.text if isinstance(each, TimedOut) else None for each in self._seat.end_launch()]
        self._awaits_task = True
        self._link.send("ended", number, {**told, "unread": unread})

    def _writer(self, request: Request) -> Callable[[str, bytes], bool]:
        # Nodes that share a machine share a terminal: there the control node's lines and these stand side by side.
        sends = request.logs == "all" and request.machine.nodes_here == 1

        def write(stream: str, lines: bytes) -> bool:
            if lines and sends:
                self._send_lines(stream, lines.decode())
            return self._output.write(stream, lines)

        return write

    def _ask_to_complete(self) -> None:
        self._awaits_task = True
        self._link.send("complete")

    def _ask_to_store(self, store: Store | None) -> None:
        self._awaits_task = store is not None
        self._link.send("store", None if store is None else to_wire(store))

    def _new_agent(self, *args: Any) -> AgentProcess:
        return _ToldAgent(self._link, *args)


class _ToldAgent(AgentProcess):
    """An agent of whose guardian the task is told: if this process is killed, the task waits until that has ended all."""

    def __init__(self, link: LinkEnd, *args: Any) -> None:
        super().__init__(*args)
        self._link = link

    def start(self) -> None:
        """Start the agent, and tell the task of its guardian."""
        super().start()
        if (pid := self.pid) is not None:
            self._link.send("guards", pid, began(pid))
