"""The commands of `before_run` on this node, which run one after the other before it is *ready*.

Each runs in the place of an agent, so it is watched and stopped like workers. Nodes that share a working directory take
turns there: else they would install into one place or make the same files at the same time.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..events import Event, label
from ..gang.cause import Cause, describe_exit
from ..gang.messages import Report
from ..launch.commands import is_by_shell, system_program
from .agent import AgentProcess, Options
from .agent_end import MachineFaults
from .agent_events import AgentEnded, AgentEvent, AgentNews, End
from .headlines import left_behind
from .pipes import LogReader, Write, pipe_path
from .request import Request
from .seat import Seat
from .start import environment_of_commands, make_folder

_TAIL_LINES = 30
_SHOWN_CHARS = 200
_HAS_FOLDER = "TORCHRUN_BEFORE_RUN"  # a command may start a gang of its own, in the folder that its node has


def shown(words: Sequence[str]) -> str:
    """Return a command as one line for the log."""
    text = words[2] if is_by_shell(words) else shlex.join(words)
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"


class Commands:
    """The commands of one launch on this node, from their start to the end of the last process."""

    number = -1  # in the place of a generation's

    def __init__(
        self, request: Request, seat: Seat, launch: int, write: Write, new_agent: Callable[..., AgentProcess]
    ) -> None:
        self._request, self._seat, self._launch, self._new_agent = request, seat, launch, new_agent
        self.are_over = False  # whether all have ended well
        self._inbox = seat.inbox  # this launch's; a later launch has another
        self._at, self._began_at = -1, 0.0  # the command that runs, or was the last, and when it began
        self._is_next_due = self._has_failed = self._is_closed = False
        self._agent: AgentProcess | None = None
        self._faults = MachineFaults()
        self._cwd = os.path.realpath(request.cwd or os.getcwd())
        self._folder = make_folder(request, f"launch{launch}-before_run")
        try:
            env = environment_of_commands(request, seat.link.own_address, request.environ)
            self._env = {**env, _HAS_FOLDER: self._cwd}
            self._logs = self._reader(write)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._turn = self._open_turn()

    def _reader(self, write: Write) -> LogReader:
        node, num_nodes, count = self._seat.node, self._seat.num_nodes, len(self._request.commands)
        of_node = "" if num_nodes == 1 else f"node {node} "
        is_hidden = self._request.logs == "rank0" and node != 0
        return LogReader(
            self._folder,
            {each: (f"[{of_node}before_run {each + 1}/{count}] ", is_hidden) for each in range(count)},
            label(node, num_nodes),
            write,
        )

    def _open_turn(self) -> int | None:
        """Return the file whose lock is the turn in the folder; None if a command with the turn has started this gang."""
        if self._request.environ.get(_HAS_FOLDER) == self._cwd:
            return None
        with suppress(OSError):
            return os.open(self._cwd, os.O_RDONLY | os.O_CLOEXEC)
        return None

    # --- their life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; `poll` starts the first one. All further news arrives as `AgentNews`."""
        self._logs.start()
        self._is_next_due = True
        if not self._has_turn():
            text = f"waiting: the commands of another node run in the same folder, {self._cwd}"
            self._seat.emit(Event("note", self._seat.node, text))

    def poll(self) -> Cause | None:
        """Start the next command, when it is due and this node has its turn; return why it could not be started."""
        if not self._is_next_due or not self._has_turn():
            return None
        self._is_next_due = False
        self._at += 1
        try:
            self._begin()
        except (OSError, ValueError) as error:
            self._end_turn()
            return self._ended(None, f"could not be started: {error}")
        return None

    def _has_turn(self) -> bool:
        try:
            if self._turn is not None:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some file systems, such as some NFS, have no such locks
            pass
        return True

    def _begin(self) -> None:
        request, words = self._request, self._request.commands[self._at]
        self._write("stdout", f"$ {shown(words)}")
        # The shell is found here, because the user's PATH for the commands may lack it.
        program = system_program(words[0]) if is_by_shell(words) else words[0]
        both = pipe_path(self._folder, self._at, "stdout")  # one pipe for both streams keeps their order
        options = Options(both, both, grace_s=request.grace_s, cwd=request.cwd)
        inbox, number = self._inbox, self.number
        self._began_at = time.monotonic()
        self._agent = self._new_agent(
            [program, *words[1:]], self._env, options, lambda event: inbox.put_nowait(AgentNews(number, event))
        )
        self._agent.start()

    def handle(self, event: AgentEvent) -> Cause | None:
        """Handle an event of the running command; return the failure that it reports."""
        match event:
            case AgentEnded():
                return self._ended(event.status, self._faults.how_ended(event.status))
            case End() if self._has_failed:
                self._end_turn()
            case End():
                self._is_next_due = self._at + 1 < len(self._request.commands)
                self.are_over = not self._is_next_due
                for each in left_behind(self._seat.node, event.left, "commands"):
                    self._seat.emit(each)
        return None

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop what still runs, and show the last output; safe to call more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._logs.let_end()
        try:
            if self._agent is not None:
                await self._agent.close(grace_s)
        finally:
            self._logs.finish(explained=True)
            self._end_turn()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            os.close(turn)

    # --- how they ended -------------------------------------------------------------------------

    def _ended(self, status: int | None, how: str) -> Cause | None:
        """Tell the gang of a command that has ended, and return its failure; `status` None: it could not be started."""
        seconds = time.monotonic() - self._began_at
        self._logs.read_now(self._at)
        if status == 0:
            self._write("stderr", f"ended well after {seconds:.1f} s")
            self._logs.read_now(self._at)
        commands, node = self._request.commands, self._seat.node
        name = f"before_run {self._at + 1}/{len(commands)} ({shown(commands[self._at])})"
        # The error has the hints on signals.
        short = how if status is None else describe_exit(status).partition(":")[0]
        data = {"text": f"{name} {short}", "exit_code": status, "seconds": round(seconds, 3)}
        self._seat.link.send(Report("command", self._launch, data=data))
        if status == 0:
            return None
        self._has_failed = True
        lines = _last_lines(self._logs.tail(self._at, "stdout"))
        return Cause("command", node, self._seat.host, None, None, status, f"{name} {how}", lines)

    def _write(self, stream: str, line: str) -> None:
        """Write a line of ours among a command's output."""
        with open(pipe_path(self._folder, self._at, stream), "ab", buffering=0) as pipe:
            pipe.write(f"{line}\n".encode(errors="backslashreplace"))


def _last_lines(text: str) -> str:
    """Return the last lines of a command's output; a progress bar (with CR) is reduced to its last state."""
    lines = [line.removesuffix("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines[-_TAIL_LINES:])
