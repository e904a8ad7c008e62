"""The commands of `before_run` on this node, which run before it is *ready*.

The script `command_runner` runs them in the place of an agent, so they are watched and stopped like workers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..events import label
from ..gang.cause import Cause, Failure, describe_exit
from ..gang.messages import Report
from ..launch.command import COMMAND_RUNNER
from ..launch.commands import is_by_shell, system_program
from ..logs.pipes import AGENT, LogReader, pipe_path
from ..machine.detached import isolated
from .agent import AgentProcess, Options
from .agent_end import AgentEnd
from .agent_events import AgentEnded, AgentEvent, AgentNews, End
from .headlines import left_behind
from .news import Seen
from .plan import Plan
from .seat import Seat
from .start import environment_of_commands, make_folder, of_task

_RUNNER = "command runner"  # its name in messages
_TAIL_LINES = 30
_SHOWN_CHARS = 200


def shown(words: Sequence[str]) -> str:
    """Return a command as one line for the log."""
    text = words[2] if is_by_shell(words) else shlex.join(words)
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"


@dataclass(frozen=True)
class _Ended:
    """A command that has ended or could not be started, as written by `command_runner`."""

    number: int  # from 0
    status: int | None
    error: str | None
    seconds: float


class Commands:
    """The commands of one launch on this node, from their start to the end of the last process."""

    number = -1  # in the place of a generation's

    def __init__(self, plan: Plan, seat: Seat, launch: int, new_agent: Callable[..., AgentProcess]) -> None:
        self._plan, self._seat, self._launch = plan, seat, launch
        self._told = 0  # of how many ended commands the gang knows
        self._has_failed = self._is_closed = False
        self._folder = make_folder(plan, f"launch{launch}-before_run")
        try:
            command = self._write_command()
            env = environment_of_commands(plan, seat.link.own_address, plan.environ)
            self._logs = self._reader()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._end = AgentEnd(plan, seat.host, self._logs.tail, _RUNNER)
        inbox = seat.inbox  # this launch's; a later launch has another
        self._agent = new_agent(
            command, env, self._options(), lambda event: inbox.put_nowait(AgentNews(self.number, event))
        )

    def _reader(self) -> LogReader:
        plan, count = self._plan, len(self._plan.commands)
        node = plan.spec.node_index
        of_node = "" if plan.spec.num_nodes == 1 else f"node {node} "
        is_hidden = plan.logs == "rank0" and node != 0
        return LogReader(
            self._folder,
            {each: (f"[{of_node}before_run {each + 1}/{count}] ", is_hidden) for each in range(count)},
            label(node, plan.spec.num_nodes),
            plan.write,
            cuts=True,
        )

    def _write_command(self) -> list[str]:
        """Write the commands for the runner; return its argv."""
        commands = []
        for words in self._plan.commands:
            # The shell is found here, because the user's PATH for the commands may lack it.
            program = system_program(words[0]) if is_by_shell(words) else words[0]
            commands.append({"argv": [program, *words[1:]], "shown": shown(words)})
        with open(os.path.join(self._folder, "commands.json"), "w", encoding="ascii") as file:
            json.dump(commands, file)
        # Isolated: neither the commands' variables nor installed packages may change what the runner does.
        python = isolated(self._plan.spec.python, self._plan.environ)
        return [*python, COMMAND_RUNNER, self._folder]

    def _options(self) -> Options:
        plan, folder = self._plan, self._folder
        return Options(
            stdout=pipe_path(folder, AGENT, "stdout"),
            stderr=pipe_path(folder, AGENT, "stderr"),
            grace_s=plan.grace_s,
            **of_task(plan),
        )

    # --- their life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first one. All further news arrives as `AgentNews`."""
        self._logs.start()
        self._agent.start()

    def handle(self, event: AgentEvent) -> Seen:
        """Handle an event; return what is known by it."""
        told, cause = self._just_ended(), self._failure(event)
        if cause is not None and not self._has_failed:
            self._has_failed = True
            return Seen(told, failed=f"{cause.exception}", failures=(Failure(cause),))
        if not isinstance(event, End) or self._has_failed:
            return Seen(told)
        return Seen([*told, *left_behind(self._seat.node, event.left, "commands")], is_over=True)

    def poll(self, is_quiet: bool) -> Seen:
        """Return the commands that have ended since the last look."""
        return Seen(self._just_ended())

    def _failure(self, event: AgentEvent) -> Cause | None:
        match event:
            case AgentEnded():
                self._end.exit_code = event.status
            case End() if self._end.exit_code is None:
                self._end.record(event)
            case _:
                return None
        return None if self._end.exit_code == 0 else self._cause()

    def _cause(self) -> Cause:
        failed = next((each for each in self._ended() if each.status != 0), None)
        if failed is None:
            return self._end.cause(has_workers=False)
        node, host = self._plan.spec.node_index, self._seat.host
        lines = _last_lines(self._logs.tail(failed.number, "stdout"))
        text = self._text(failed, self._end.machine.how_ended)
        return Cause("command", node, host, None, None, failed.status, text, lines)

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop what still runs, and show the last output; safe to call more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._logs.let_end()
        try:
            await self._agent.close(grace_s)
        finally:
            self._logs.finish(explained=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- how they ended -------------------------------------------------------------------------

    def _just_ended(self) -> list[Report]:
        new = self._ended()[self._told :]
        self._told += len(new)
        return [self._as_message(each) for each in new]

    def _as_message(self, ended: _Ended) -> Report:
        # Without hints on signals: the error has them.
        text = self._text(ended, lambda status: describe_exit(status).partition(":")[0])
        data = {"text": text, "exit_code": ended.status, "seconds": round(ended.seconds, 3)}
        return Report("command", self._launch, data=data)

    def _ended(self) -> list[_Ended]:
        with suppress(OSError), open(os.path.join(self._folder, "ended.jsonl"), encoding="ascii") as file:
            return [_Ended(**json.loads(line)) for line in file if line.endswith("\n")]
        return []

    def _text(self, ended: _Ended, exit_text: Callable[[int], str]) -> str:
        commands = self._plan.commands
        name = f"before_run {ended.number + 1}/{len(commands)} ({shown(commands[ended.number])})"
        return f"{name} {ended.error if ended.status is None else exit_text(ended.status)}"


def _last_lines(text: str) -> str:
    """Return the last lines of a command's output; a progress bar (with CR) is reduced to its last state."""
    lines = [line.removesuffix("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines[-_TAIL_LINES:])
