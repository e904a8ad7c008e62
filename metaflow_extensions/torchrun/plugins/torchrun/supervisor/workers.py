"""The workers of one generation on this node: which run, how they ended, and why they failed.

`agent` sees a worker die and reads its exit code, or has it from torchrun.

A worker records the exception that ended it (`worker_hooks`). The end of its stderr is shown as it is; no cause is
derived from it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

from ..gang.cause import Cause, describe_exit, remedy_of_exit
from ..gang.messages import Go
from ..machine.aside import STUCK_S, Aside
from ..machine.cgroup import describe_oom, oom_kills
from ..texts import headline
from ..worker.remedies import remedy
from .agent import AgentProcess, WorkerEnded
from .call import Call
from .pipes import LogReader
from .side import Side

_TAIL_LINES, _STDOUT_LINES = 30, 10
# Of the exception itself; one in an ExceptionGroup has its own after more blanks.
_TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE)
_OF_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.|/metaflow_extensions/torchrun/")


class Workers:
    """The workers of one generation on this node, and their ends, as the generation and its observers see them."""

    def __init__(self, call: Call, go: Go, side: Side, folder: str, logs: LogReader, agent: AgentProcess) -> None:
        self.call, self.go, self.side = call, go, side
        self.folder = folder  # torchrun's --log-dir
        self.files = Aside()  # does what the disk of `folder` may hold up
        self.logs, self.agent = logs, agent
        self.pids: dict[int, int] = {}  # global rank -> pid, of all that have started
        self.reported_at: float | None = None  # when a worker last wrote metrics
        self._ends: dict[int, WorkerEnded] = {}  # local rank -> its end
        self._records: dict[int, Record | None] = {}  # local rank -> what it has left, once that is read

    @property
    def last_sign_at(self) -> float | None:
        """When a worker was last found to have written, reported or ended."""
        signs = (self.logs.last_output_at, self.reported_at, *(end.at for end in self._ends.values()))
        return max((at for at in signs if at is not None), default=None)

    @property
    def codes(self) -> dict[int, int]:
        """Global rank -> exit code of all workers that have ended."""
        return {end.rank: end.status for end in self._ends.values()}

    @property
    def early(self) -> tuple[int, ...]:
        """The ranks that have ended with code 0, and had not been told to stop."""
        return tuple(end.rank for end in self._ends.values() if end.status == 0 and not end.stopped)

    def running(self) -> dict[int, int]:
        """Return global rank -> pid of the workers that run."""
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.codes}

    def record(self, end: WorkerEnded) -> bool:
        """Record a worker's end; return whether it is known to have failed by itself."""
        self._ends[end.local_rank] = end
        if end.status != 0:
            self.files.begin(self._read)
        return end.has_failed

    async def trained_alone(self) -> bool:
        """Read all that workers have left, if the disk answers; return whether all have trained by themselves."""
        try:
            return await self.files.within(STUCK_S, self._read)
        except TimeoutError as error:
            self.side.say("note", f"{error}: metrics may be missing, and of a failure only the exit code is known")
            return False

    def _read(self) -> bool:
        """Read the records; return whether every worker recorded that it computed gradients without a process group."""
        for local_rank, end in list(self._ends.items()):
            if end.status != 0 and local_rank not in self._records:
                self._records[local_rank] = read_record(worker_folder(self.folder, local_rank))
        folders = (worker_folder(self.folder, local_rank) for local_rank in range(self.call.nproc))
        return all(os.path.exists(os.path.join(folder, "trained-alone")) for folder in folders)

    # --- why ------------------------------------------------------------------------------------

    def failed(self) -> list[WorkerEnded]:
        """Return the workers whose exit codes say that they have failed by themselves."""
        return [end for end in self._ends.values() if end.has_failed]

    def causes(self, stopped_at: float) -> list[tuple[float, Cause]]:
        """Return when and why workers have failed, the earliest first; `stopped_at` is when we began to stop them."""
        told = self._told_to_stop_at(stopped_at)
        found = (self._cause_of(end, told) for end in self._ends.values())
        return sorted(filter(None, found), key=lambda dated: dated[0])

    def _told_to_stop_at(self, stopped_at: float) -> float:
        """Return the earliest time at which a worker of this node may have got a signal to stop.

        torchrun does so, too, but not before a worker has failed.
        """
        by_torchrun = (end.stopped_at for end in self._ends.values() if end.stopped_at is not None)
        return min([stopped_at, *by_torchrun, *(end.at for end in self.failed())])

    def _cause_of(self, end: WorkerEnded, told: float) -> tuple[float, Cause] | None:
        """Return when and why a worker failed; None if it did not fail by itself.

        What a stopped worker has raised after it can have been `told` to stop is no cause.
        """
        if end.status == 0:
            return None
        code, is_signal = end.status, end.status < 0
        who = (self.call.node_index, self.side.host, end.rank, end.local_rank)
        stdout = last_lines(as_shown(self.logs.tail(end.local_rank, "stdout").rstrip()), _STDOUT_LINES)
        if (record := self._records.get(end.local_rank)) is not None:
            if end.stopped and record.at > told:
                return None
            shown = None if end.stopped and is_signal else code
            cause = Cause("exception", *who, shown, record.exception, record.traceback, record.advice, stdout)
            return record.at, replace(cause, place=_place(record.traceback))
        if end.stopped:
            return None  # it obeyed the signal
        stderr = without_labels(self.logs.tail(end.local_rank, "stderr"))
        advice, lines = remedy_of_exit(code, self.call.bools, stderr), last_lines(stderr)
        if is_signal:
            return end.at, Cause("signal", *who, code, None, lines, advice, stdout)
        last = lines.rstrip().rpartition("\n")[2]
        # An indented line belongs to what stands before it, as the source line to a warning.
        last = headline(last) if last and not last[0].isspace() else ""
        return end.at, Cause("exit", *who, code, None, lines, advice or remedy(last), stdout, last_line=last)


def _place(traceback: str) -> str:
    """Return file and line of the last frame that is no library's; empty if there is none."""
    *_, last = re.split(_TRACEBACK, traceback)  # before it are the causes of the exception
    last = last.partition("\n  +-")[0]  # after it are the exceptions in an ExceptionGroup
    frames = re.findall(r'^[ |]*File "([^<].*)", line (\d+)', last, re.MULTILINE)
    own = [frame for frame in frames if not _OF_LIBRARIES.search(frame[0])]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def worker_folder(log_dir: str, local_rank: int) -> str:
    """Return the folder that torchrun made for a worker; it may not exist.

    It is ``<run id>_<random>/attempt_0/<local rank>`` (``DefaultLogsSpecs`` in
    ``torch/distributed/elastic/multiprocessing/api.py``, torch 2.13).
    """
    return next(glob.iglob(f"{glob.escape(log_dir)}/*/attempt_0/{local_rank}"), f"{log_dir}/none")


class MachineFaults:
    """What this machine has done to the workers of one generation since this object was made."""

    def __init__(self) -> None:
        self._oom_kills_before = oom_kills()

    def explained(self, cause: Cause) -> Cause:
        """Return `cause`, explained by the machine's state."""
        if cause.kind == "signal" and self.is_out_of_memory(cause.exit_code):
            cause = replace(cause, kind="oom", exception=describe_oom())
        return cause

    def how_ended(self, exit_code: int) -> str:
        """Say how a process ended."""
        return f"ran {describe_oom()}" if self.is_out_of_memory(exit_code) else describe_exit(exit_code)

    def is_out_of_memory(self, exit_code: int | None) -> bool:
        """Tell whether it was the kernel's out-of-memory killer: its counter has moved since *go*."""
        before, now = self._oom_kills_before, oom_kills()
        return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before


# --- what a worker leaves -----------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The exception that ended a worker, as its hook recorded it."""

    exception: str  # type and message
    traceback: str
    at: float  # when it was raised, in this machine's monotonic seconds
    advice: str  # what to change


def read_record(folder: str) -> Record | None:
    """Return what the worker with this folder recorded of its end; None if it recorded nothing, or not all of it."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        with open(os.path.join(folder, "exception.json"), encoding="utf-8", errors="replace") as file:
            data = json.load(file)
        said, trace = (_printable(data[name]).rstrip() for name in ("exception", "traceback"))
        return Record(said, trace, float(data["at"]), str(data.get("advice", "")))
    return None


def _printable(text: str) -> str:
    """Escape lone surrogates, as Python's stderr does: no log could take them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# torch prefixes an uncaught exception with its rank once a process group exists
# (torch/distributed/distributed_c10d.py, _distributed_excepthook, torch 2.13).
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)


def without_labels(text: str) -> str:
    """Return a text without torch's prefixes, as a terminal shows it."""
    return _RANK_PREFIX.sub("", as_shown(text))


def last_lines(text: str, most: int = _TAIL_LINES) -> str:
    """Return the end of a text, as long as a message shows it."""
    return "\n".join(text.split("\n")[-most:])


def as_shown(text: str) -> str:
    """Return a text as a terminal shows it: of a progress bar, which writes over itself, the last state."""
    lines = text.removesuffix("\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
