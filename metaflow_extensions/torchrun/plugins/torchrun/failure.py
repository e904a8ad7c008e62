"""From what a failed worker left behind to a cause that can be named.

A worker leaves an exit status, the record of the exception that ended it (`worker_hooks`, or torchelastic's error
file of scripts that use ``@record``), and the end of its stderr, which is shown, but from which nothing is guessed.
Each becomes a `Cause`; `first_cause` picks the one that started it all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Any

TAIL_LINES = 30
_TAIL_BYTES = 64 * 1024
# Far below the channel's limit of 1 MiB for a message, which has a text twice: as the cause and as the error.
_MAX_TEXT = 8 * 1024

# Failures that follow from another node's failure: the peer was gone, so the collective failed.
_CONNECTION_ERRORS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|"
    r"connect(ion)? timed? ?out|gloo.*(timed out|closed|reset)|heartbeat monitor|"
    r"ncclRemoteError|ncclSystemError|NCCL (error|communicator was aborted)|DistNetworkError|DistStoreError|"
    r"failed to recv|failed to connect|recvValue failed|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
# Has the workers' hook (`worker_hooks`) show such an exception in one line.
SHORT_PEER_ERRORS = {"TORCHRUN_PEER_GONE": _CONNECTION_ERRORS.pattern}
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

# torch prefixes an uncaught exception with its rank once a process group exists
# (torch/distributed/distributed_c10d.py, _distributed_excepthook, torch 2.13).
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")

_SIGNAL_HINTS = {
    "SIGKILL": "often the out-of-memory killer; try fewer processes, smaller batches or more memory",
    "SIGSEGV": "a crash in native code; set PYTHONFAULTHANDLER=1 to see the Python stack",
    "SIGBUS": "often a full /dev/shm; raise shared_memory of @kubernetes, @batch or @resources",
    # torch 2.13 with gloo does so at interpreter exit when a DistributedDataParallel object is still
    # alive after destroy_process_group: "terminate called without an active exception".
    "SIGABRT": "native code gave up; its last lines on stderr say why. If that was at its very end, delete the DDP model "
    "and call gc.collect() before destroy_process_group()",
    "SIGTERM": "somebody told it to stop",
}


_CATEGORIES = {
    "exception": "user",
    "exit": "user",
    "step": "user",
    "call": "user",
    "signal": "killed",
    "oom": "killed",
    "agent": "start",
    "agent_ended": "killed",
    "lost": "node_lost",
    "terminated": "preempted",
    "timeout": "timeout",
    "step_timeout": "timeout",
    "hang": "hang",
    "frozen": "hang",
    "store": "store",
}


@dataclass(frozen=True)
class Cause:
    """One failure of the gang.

    Attributes
    ----------
    kind : str
        ``"exception"``, ``"exit"``, ``"signal"``, ``"oom"`` (out of memory), ``"agent"`` (could not start),
        ``"agent_ended"`` (while its workers ran), ``"lost"``, ``"step"`` (the step's own code), ``"call"`` (`run`
        refused it), ``"terminated"``, ``"timeout"`` (of a launch), ``"step_timeout"`` (the step's, on one node),
        ``"hang"``, ``"frozen"`` (stopped by a signal) or ``"store"`` (the datastore).
    node : int
        Index of the node.
    host : str
        Its host name.
    rank, local_rank : int or None
        The worker; None when the node itself failed.
    exit_code : int or None
        Exit code, negative for a signal, as `subprocess` has it.
    exception : str or None
        Type and message of the exception; for ``"oom"`` what the kernel says.
    detail : str
        Traceback, or the end of the worker's stderr.
    """

    kind: str
    node: int
    host: str
    rank: int | None = None
    local_rank: int | None = None
    exit_code: int | None = None
    exception: str | None = None
    detail: str = ""

    @property
    def category(self) -> str:
        """The class of the cause, which decides about restarts.

        ``"user"`` (an exception or an exit code), ``"killed"`` (by a signal or for lack of memory),
        ``"start"`` (the agent gave up before or without its workers), ``"node_lost"``, ``"preempted"``,
        ``"timeout"``, ``"hang"`` or ``"store"`` (a returned value could not be stored or loaded).
        """
        if self.kind == "agent" and self.exit_code is not None and self.exit_code < 0:
            return "killed"
        return _CATEGORIES[self.kind]

    def to_wire(self) -> dict[str, Any]:
        """Return the cause as JSON-able data of bounded size, with its class."""
        bounded = replace(
            self, exception=self.exception and self.exception[:_MAX_TEXT], detail=self.detail[-_MAX_TEXT:]
        )
        return {**asdict(bounded), "category": self.category}

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Cause:
        """Return the cause that `to_wire` described; unknown fields are ignored."""
        known = {field.name for field in fields(Cause)}
        return Cause(**{name: value for name, value in data.items() if name in known})

    def is_same_event(self, other: Mapping[str, Any]) -> bool:
        """Tell whether `other`, as plain data, tells of this same failure, perhaps from another place in the code."""
        return all(getattr(self, name) == other.get(name) for name in ("kind", "node", "rank", "exception"))

    @property
    def who(self) -> str:
        """Name the failed worker or node, or the launch as a whole."""
        if self.kind in ("hang", "timeout"):
            return "the launch"
        node = f"node {self.node} (host {self.host})"
        return node if self.rank is None else f"Rank {self.rank} on {node}"

    @property
    def what(self) -> str:
        """Say in one line how it ended."""
        if self.kind == "store" or (self.kind == "frozen" and self.rank is not None):
            return str(self.exception)
        if self.kind in ("agent", "agent_ended", "lost", "frozen"):
            return f"failed: {self.exception}"
        if self.kind == "terminated":
            return f"was preempted: {self.exception}"
        if self.kind in ("oom", "timeout", "step_timeout"):
            return f"ran {self.exception}"
        if self.kind == "hang":
            return f"hangs: {self.exception}"
        if self.exception is not None and self.kind != "signal":
            return f"failed with {self.exception}"
        return describe_exit(self.exit_code) if self.exit_code is not None else "failed"

    def describe(self) -> str:
        """Return the full report: who, what, exit status, traceback or stderr."""
        who = self.who
        lines = [f"{who[0].upper()}{who[1:]} {self.what}" + ("" if self.what.endswith(".") else ".")]
        if (
            self.exception is not None
            and self.exit_code is not None
            and self.kind not in ("agent", "agent_ended", "signal", "oom")
        ):
            lines.append(f"It {describe_exit(self.exit_code)}.")
        if self.detail:
            if self.kind not in ("exception", "step", "call"):  # theirs is a traceback
                lines.append("Last lines of its stderr:")
            # Metaflow's console strips leading spaces; behind the bar the indentation survives.
            lines += [f"  | {line}" for line in self.detail.splitlines()]
        return "\n".join(lines)


def describe_exit(code: int) -> str:
    """Say what an exit code (negative for a signal) means."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal_name(-code)
    hint = _SIGNAL_HINTS.get(name)
    return f"was killed by {name}" + (f": {hint}" if hint else "")


def signal_name(number: int) -> str:
    """Return the name of a signal, or ``signal N`` for one this system does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker of this node ended.

    Attributes
    ----------
    local_rank, rank : int
        Which worker.
    exit_code : int
        Negative for a signal.
    stopped : bool
        Whether the end came after we (or its agent) had begun to stop it.
    age_s : float
        Seconds ago.
    """

    local_rank: int
    rank: int
    exit_code: int
    stopped: bool
    age_s: float


@dataclass(frozen=True)
class Record:
    """The exception that ended a worker, as it said itself.

    Attributes
    ----------
    exception, traceback : str
        Type and message; the traceback.
    at : float
        When it was raised, in this machine's monotonic seconds.
    """

    exception: str
    traceback: str
    at: float


def worker_cause(
    end: WorkerEnd, node: int, host: str, folder: str, stopped_at: float = float("inf")
) -> tuple[Cause, float | None] | None:
    """Return why a worker failed, and when if it said so; None if it did not fail by itself.

    Parameters
    ----------
    end : WorkerEnd
        Its end.
    node, host : int, str
        Where it ran.
    folder : str
        The folder with its stderr log and what it recorded; anything may be missing.
    stopped_at : float
        When the workers were told to stop. What one that `end` says was stopped has raised after it, is no cause.
    """
    if end.exit_code == 0:
        return None
    record = read_record(folder)
    who = (node, host, end.rank, end.local_rank)
    if record is not None:
        if end.stopped and record.at > stopped_at:
            return None
        exit_code = None if end.stopped and end.exit_code < 0 else end.exit_code
        return Cause("exception", *who, exit_code, record.exception, record.traceback), record.at
    if end.stopped:
        return None  # it obeyed
    tail = "\n".join(read_tail(os.path.join(folder, "stderr.log"))[-TAIL_LINES:])
    return Cause("signal" if end.exit_code < 0 else "exit", *who, end.exit_code, None, tail), None


def read_record(folder: str) -> Record | None:
    """Return what the worker with this folder recorded of its end; None if it recorded nothing, or not all of it."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        data = _read_json(os.path.join(folder, "exception.json"))
        return Record(_printable(data["exception"]), _printable(data["traceback"]).rstrip(), float(data["at"]))
    return _read_error_file(os.path.join(folder, "error.json"))


def _read_error_file(path: str) -> Record | None:
    """Return what ``@record`` left, or None.

    The format is that of ``torch/distributed/elastic/multiprocessing/errors/error_handler.py`` (torch 2.13).
    """
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        message = _read_json(path)["message"]
        at = time.monotonic() - max(0.0, time.time() - os.path.getmtime(path))
        if isinstance(message, str):
            return Record(_printable(message), _printable(message), at)
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
        return Record(_printable(str(message["message"])), _printable(trace).rstrip(), at)
    return None


def _read_json(path: str) -> Any:
    with open(path, encoding="utf-8", errors="replace") as file:
        return json.load(file)


def _printable(text: str) -> str:
    """Escape lone surrogates, as Python's stderr does: no log could take them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_tail(path: str) -> list[str]:
    """Return the last lines of a log file, without torch's rank prefixes; none if it is missing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [_RANK_PREFIX.sub("", line) for line in text.splitlines()]


_AGENT_FAILURE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*\n\s*exitcode\s*: (?P<code>-?\d+) \(pid: \d+\)"
)


def ends_reported_by_agent(agent_stderr: str) -> dict[int, int]:
    """Return local rank -> exit code from the report torchrun prints when workers failed.

    It is the fallback for workers whose end was not seen (``_FAILURE_FORMAT_TEMPLATE`` in
    ``torch/distributed/elastic/multiprocessing/errors/__init__.py``, torch 2.13).
    """
    text = "\n".join(read_tail(agent_stderr))
    return {int(m["local_rank"]): int(m["code"]) for m in _AGENT_FAILURE.finditer(text)}


_AGENT_SIGNALS = re.compile(r"Sending process (\d+) closing signal")


def pids_stopped_by_agent(agent_stderr: str) -> set[int]:
    """Return the pids that torchrun itself has told to stop, because another worker failed.

    It says so before it sends the signal (``SubprocessContext._close`` in
    ``torch/distributed/elastic/multiprocessing/api.py``, torch 2.13).
    """
    return {int(m[1]) for m in _AGENT_SIGNALS.finditer("\n".join(read_tail(agent_stderr)))}


# "W1121 18:44:10.792000 1227 torch/...", the local time (torch/_logging, torch 2.13).
_DATED_AGENT_SIGNAL = re.compile(r"^W(\d{4} \d\d:\d\d:\d\d\.\d+) .*Sending process \d+ closing signal", re.MULTILINE)
# A line that seems older is of another time zone, or of a summer that has ended.
_OLDEST_LINE_S = 900.0


def agent_stopped_workers_at(agent_stderr: str) -> float:
    """Return when torchrun itself told the first worker to stop, in monotonic seconds; infinity if that is not known.

    The guardian can be late to see the failure that made torchrun do so.
    """
    found = _DATED_AGENT_SIGNAL.search("\n".join(read_tail(agent_stderr)))
    if found is not None:
        now = datetime.now()
        with suppress(ValueError):
            age_s = (now - datetime.strptime(f"{now.year} {found[1]}", "%Y %m%d %H:%M:%S.%f")).total_seconds()
            if 0 <= age_s < _OLDEST_LINE_S:
                return time.monotonic() - age_s
    return float("inf")


_AGENT_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


def signal_got_by_agent(tail: Sequence[str]) -> int | None:
    """Return the signal that made torchrun give up, as it says on its stderr, or None.

    (``_terminate_process_handler`` in ``torch/distributed/elastic/multiprocessing/api.py``, torch 2.13.)
    """
    found = _AGENT_SIGNALLED.search("\n".join(tail))
    return None if found is None else int(found[1])


@dataclass(frozen=True)
class DatedCause:
    """A cause and the moment it happened, in seconds of the control node's monotonic clock."""

    at: float
    cause: Cause

    @cached_property
    def is_consequence(self) -> bool:
        """Whether it may follow from another failure; looked for once, since that takes milliseconds in a long text."""
        return bool(is_consequence(self.cause))


def first_cause(candidates: Iterable[DatedCause]) -> Cause | None:
    """Return the failure that started it all, or None without candidates; see `first_dated`."""
    found = first_dated(candidates)
    return None if found is None else found.cause


def first_dated(candidates: Iterable[DatedCause]) -> DatedCause | None:
    """Return the failure that started it all with its moment, or None without candidates.

    The earliest wins, but a failure that only says "my peer is gone" or "I was told to stop"
    yields to one that does not: its origin, slower to exit, may be seen a moment later.
    """
    ordered = sorted(candidates, key=lambda dated: dated.at)
    return next((dated for dated in ordered if not dated.is_consequence), ordered[0] if ordered else None)


def first_reported(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return, of the failures that a node would report, the one that can be the gang's; none if there is none."""
    dated = {DatedCause(-entry["age_s"], Cause.from_wire(entry["cause"])): entry for entry in entries}
    first = first_dated(dated)
    return [] if first is None else [dated[first]]


def is_consequence(cause: Cause) -> int:
    """Return 1 for a failure that follows from another, as far as it tells itself, else 0."""
    if cause.exit_code is not None and -cause.exit_code in _STOP_SIGNALS and cause.exception is None:
        return 1
    if cause.kind in ("exception", "exit") and _CONNECTION_ERRORS.search(cause.exception or cause.detail):
        return 1
    if cause.kind in ("agent", "agent_ended"):
        return 1 if cause.exit_code == 1 else 0
    return 0
