"""The commands of `before_run` on this node, which run one after the other before it is *ready*.

Each runs in the place of an agent, so it is watched and stopped like workers. Nodes that share a working directory take
turns there: else they would install into one place or make the same files at the same time.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ..events import label
from ..gang.cause import Cause, describe_exit
from ..gang.messages import Report
from ..parsing import is_by_shell
from .agent import AgentEnded, AgentProcess, End, Options, left_behind_line
from .call import Call
from .command import environment_of_commands, make_folder
from .pipes import LogReader, Write, pipe_path
from .side import Side
from .workers import MachineFaults, as_shown, last_lines

_SHOWN_CHARS = 200
NextNews: TypeAlias = Callable[[], Awaitable[Any]]  # waits for what comes next to the launch; raises what ends it


def shown(words: Sequence[str]) -> str:
    """Return a command as one line for the log."""
    text = words[2] if is_by_shell(words) else shlex.join(words)
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "…"


class Commands:
    """The commands of one launch on this node."""

    def __init__(
        self, call: Call, side: Side, launch: int, write: Write, new_agent: Callable[..., AgentProcess]
    ) -> None:
        self._call, self._side, self._launch, self._new_agent = call, side, launch, new_agent
        self._agent: AgentProcess | None = None
        self._faults = MachineFaults()
        self._env = environment_of_commands(call, side.own_address)
        self._folder = make_folder(call, f"launch{launch}-before_run")
        node, count = side.node, len(call.before_run)
        of_node, is_hidden = "" if side.num_nodes == 1 else f"node {node} ", call.logs == "rank0" and node != 0
        self._logs = LogReader(
            self._folder,
            {each: (f"[{of_node}before_run {each + 1}/{count}] ", is_hidden) for each in range(count)},
            label(node, side.num_nodes),
            write,
        )
        self._turn: int | None = None  # none where the folder can't be read
        with suppress(OSError):
            self._turn = os.open(call.cwd, os.O_RDONLY | os.O_CLOEXEC)

    async def run(self, next_news: NextNews) -> Cause | None:
        """Run them one after the other, when this node has its turn; return the failure of the first one that fails."""
        self._logs.start()
        if not (self._has_turn() or self._call.shares_machine):  # else the other's commands stand in this terminal
            text = f"waiting: the commands of another node run in the same folder, {os.path.realpath(self._call.cwd)}"
            self._side.say("note", text)
        while not self._has_turn():
            await next_news()
        for at in range(len(self._call.before_run)):
            began_at = time.monotonic()
            self._begin(at)
            status, error = await self._end(next_news)
            how = error or self._faults.how_ended(-signal.SIGKILL if status is None else status)
            cause = self._ended(at, status, how, time.monotonic() - began_at)
            if cause is not None:
                return cause
        return None

    def _has_turn(self) -> bool:
        """Take the lock of their folder, which is the turn there."""
        try:
            if self._turn is not None:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some file systems, such as some NFS, have no such locks
            pass
        return True

    def _begin(self, at: int) -> None:
        call, words = self._call, self._call.before_run[at]
        self._write(at, f"$ {shown(words)}")
        # Their PATH is the user's, and may lack the shell.
        program = "/bin/sh" if is_by_shell(words) else words[0]
        both = pipe_path(self._folder, at, "stdout")  # one pipe for both streams keeps their order
        options = Options(both, both, grace_s=call.grace_s, cwd=call.cwd)
        agent = self._new_agent([program, *words[1:]], self._env, options)
        agent.start()
        self._agent = agent

    async def _end(self, next_news: NextNews) -> tuple[int | None, str | None]:
        """Wait for the end of the running command; return its exit code, and why it could not be started.

        A good end is that of all that it has started.
        """
        while True:
            news = await next_news()
            if isinstance(news, AgentEnded) and news.status != 0:
                return news.status, None
            if isinstance(news, End):
                if news.left:
                    self._side.say("left_behind", left_behind_line(news.left, "commands"))
                return news.status, news.error

    async def close(self, grace_s: float) -> None:
        """Stop what still runs, and show the last output."""
        self._logs.let_end()
        try:
            if self._agent is not None:
                await self._agent.close(grace_s)
        finally:
            self._logs.finish(explained=True)
            if self._turn is not None:
                os.close(self._turn)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ended(self, at: int, status: int | None, how: str, seconds: float) -> Cause | None:
        """Tell the gang of a command that has ended, and return its failure; `status` None: it could not be started."""
        self._logs.read_now(at)
        commands, node = self._call.before_run, self._side.node
        name = f"before_run {at + 1}/{len(commands)} ({shown(commands[at])})"
        # The error has the hints on signals.
        short = how if status is None else describe_exit(status).partition(":")[0]
        data = {"text": f"{name} {short}", "exit_code": status, "seconds": round(seconds, 3)}
        self._side.send(Report("command", self._launch, data=data))
        if status == 0:
            return None
        lines = last_lines(as_shown(self._logs.tail(at, "stdout").rstrip("\n")))
        return Cause("command", node, self._side.host, None, None, status, f"{name} {how}", lines)

    def _write(self, at: int, line: str) -> None:
        """Write a line of ours among a command's output."""
        with open(pipe_path(self._folder, at, "stdout"), "ab", buffering=0) as pipe:
            pipe.write(f"{line}\n".encode(errors="backslashreplace"))
