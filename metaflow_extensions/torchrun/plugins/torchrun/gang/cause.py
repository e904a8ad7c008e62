"""The causes of failures as data, the texts of errors made from them, the choice of the first failure, and what to change.

Each failure becomes a `Cause`, and `first_failure` picks the one that the others follow from. An error holds a
`FailureText`: its cause and the text around it. To change what an error says, change that object: nothing parses a
finished text.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from ..errors import TorchrunError

# Far below the channel's limit of 1 MiB for a message.
_MAX_TEXT = 8 * 1024
_MAX_STDOUT = 2 * 1024

# What NCCL says of its own rank's call (`ncclResult_t` as torch 2.1 to 2.14 explain it, getNcclErrorDetailString in
# NCCLUtils.cpp), not of a peer. It stands on the line after "NCCL error in: FILE:LINE, ...".
_OWN_NCCL_ERROR = r"[\s\S]{0,600}?nccl(InvalidUsage|InvalidArgument|UnhandledCudaError)"
# A script talks to other servers, too. torch (2.13) raises these types for its peers, and marks a RuntimeError by the C++
# file, the library or the backend in its text, or raises it in a file of torch.distributed.
_OF_TORCH = r"gloo|nccl|c10d|TCPStore|ProcessGroup"
_RAISED_BY_TORCH = rf"torch\.distributed\.Dist\w*Error|RuntimeError: (?=[\s\S]*?({_OF_TORCH}|\nraised in torch$))"
_PEER_GONE = (
    r"(connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|"
    r"connect(ion)? timed? ?out|gloo.*(timed out|closed|reset)|heartbeat monitor|"
    rf"ncclRemoteError|ncclSystemError|NCCL error(?!{_OWN_NCCL_ERROR})|NCCL communicator was aborted|"
    r"DistNetworkError|DistStoreError|"
    r"failed to recv|failed to connect|recvValue failed|watchdog caught collective operation timeout)"
)
# Failures that follow from another node's failure: the peer was gone, so the collective failed.
_CONNECTION_ERRORS = re.compile(rf"\A(?={_RAISED_BY_TORCH})[\s\S]*?{_PEER_GONE}", re.IGNORECASE)
# The same in stderr, of a worker that left no exception: in one line, since other lines are about other servers.
_CONNECTION_LINES = re.compile(rf"^(?=.*({_OF_TORCH}|torch\.distributed)).*?{_PEER_GONE}", re.IGNORECASE | re.MULTILINE)
ENDS = (".", "…", "!", "?")
"""The ends of sentences."""
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_SIGNAL_HINTS = {
    "SIGKILL": "often the out-of-memory killer; try fewer processes, smaller batches or more memory",
    "SIGSEGV": "a crash in native code; set PYTHONFAULTHANDLER=1 to see the Python stack",
    "SIGBUS": "often a full /dev/shm; raise shared_memory of @kubernetes, @batch or @resources",
    "SIGABRT": "native code gave up; its last lines on stderr say why",
    "SIGTERM": "it was told to stop",
}

# The kinds of causes, each with its class.
_CATEGORIES = {
    "exception": "user",
    "exit": "user",
    "step": "user",  # the step's own code
    "call": "user",  # `run` refused it
    "interrupted": "interrupted",  # the step, as by Ctrl-C
    "signal": "killed",
    "oom": "killed",  # out of memory
    "command": "before_run",  # a command failed
    "agent": "start",  # it ended before its workers ran
    "agent_ended": "killed",  # while its workers ran
    "lost": "node_lost",
    "terminated": "preempted",
    "timeout": "timeout",  # of a launch
    "step_timeout": "timeout",  # the step's, outside of a launch
    "hang": "hang",
    "unreachable": "network",  # a node can't reach torch's store on the control node
    "store": "store",  # a returned value could not be stored or loaded
}
CATEGORY_TEXTS = {
    "user": "an error in your code",
    "killed": "a process was killed",
    "before_run": "a command of before_run failed",
    "start": "torchrun could not start the workers",
    "node_lost": "a node was lost",
    "preempted": "a node was told to stop",
    "timeout": "the time was up",
    "hang": "no rank made progress",
    "network": "the network between the nodes failed",
    "interrupted": "the run was interrupted",
    "store": "the datastore failed",
}
"""The classes of causes, each in words."""
_TELLING = frozenset({"exception", "step", "call", "hang"})  # their details are a traceback, or where the ranks were
_CAUGHT = re.compile(r": Caught \w+ (in .+)\.\nOriginal Traceback (?s:.+)\n(\S.*)\s*\Z")
# How a node or a launch ended, for the kinds that are no worker's: what follows its name.
_WHAT = {
    **dict.fromkeys(("store", "unreachable"), "{}"),
    **dict.fromkeys(("command", "agent", "agent_ended", "lost"), "failed: {}"),
    **dict.fromkeys(("oom", "timeout", "step_timeout"), "ran {}"),
    "terminated": "was preempted: {}",
    "interrupted": "was interrupted, as by Ctrl-C",
    "hang": "hangs: {}",
}


@dataclass(frozen=True)
class Cause:
    """One failure of the gang."""

    kind: str  # a key of `_CATEGORIES`
    node: int
    host: str
    rank: int | None = None  # the worker's; None when the node itself failed
    local_rank: int | None = None
    exit_code: int | None = None  # negative for a signal, as `subprocess` has it
    exception: str | None = None  # type and message; for "oom" what the kernel says
    detail: str = ""  # traceback, or the end of the worker's stderr
    advice: str = ""  # what to change, where the node or the worker knows
    stdout: str = ""  # the end of the worker's stdout, for pages
    place: str = ""  # file and line of the user's code that raised the exception
    last_line: str = ""  # of its stderr, where no exception is known

    @property
    def category(self) -> str:
        """The class of the cause, which decides about restarts."""
        if self.kind == "agent" and self.exit_code is not None and self.exit_code < 0:
            return "killed"
        return _CATEGORIES[self.kind]

    def bounded(self) -> Cause:
        """Return the cause with texts of bounded size."""
        exception, detail = self.exception and self.exception[:_MAX_TEXT], self.detail[-_MAX_TEXT:]
        return replace(
            self, exception=exception, detail=detail, advice=self.advice[:_MAX_TEXT], stdout=self.stdout[-_MAX_STDOUT:]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the cause as the plain data that errors carry (`TorchrunError.cause`), with its class."""
        return {**asdict(self.bounded()), "category": self.category}

    def is_same_event(self, other: Cause) -> bool:
        """Return whether `other` describes the same failure, perhaps as another place in the code reported it."""
        return all(getattr(self, name) == getattr(other, name) for name in ("kind", "node", "rank", "exception"))

    @cached_property  # the search takes milliseconds in a long text
    def is_consequence(self) -> bool:
        """Whether its own text or signal says that it follows from another failure."""
        if self.exception is None and self.exit_code is not None and -self.exit_code in _STOP_SIGNALS:
            return True
        if self.kind in ("exception", "exit"):
            if self.exception is None:
                return _CONNECTION_LINES.search(self.detail) is not None
            frames = re.findall(r'^ *File "(.*)", line', self.detail, re.MULTILINE)
            raised_in = "\nraised in torch" if frames and "/torch/distributed/" in frames[-1] else ""
            return _CONNECTION_ERRORS.search(self.exception + raised_in) is not None
        return self.kind in ("agent", "agent_ended") and self.exit_code == 1

    @property
    def who(self) -> str:
        """The failed worker or node, or the launch as a whole, for a sentence."""
        if self.kind in ("hang", "timeout", "interrupted"):
            return "the run" if self.kind == "interrupted" else "the launch"
        node = f"node {self.node} (host {self.host})"
        return node if self.rank is None else f"Rank {self.rank} on {node}"

    @property
    def what(self) -> str:
        """How it ended, in one line."""
        if self.kind in _WHAT:
            return _WHAT[self.kind].format(self.exception)
        if self.exception is not None and self.kind != "signal":
            # Torch raises what a DataLoader's worker has raised, with its traceback as the message (torch 2.13).
            wrapped = _CAUGHT.search(self.exception)
            raised = self.exception if wrapped is None else f"{wrapped[2]} ({wrapped[1]})"
            return f"failed{self.place and f' at {self.place}'} with {raised}"
        end = describe_exit(self.exit_code) if self.exit_code is not None else "failed"
        return f"{end}; the last line of its stderr: {self.last_line}" if self.last_line else end

    def describe(self) -> str:
        """Return the full report: who, what, exit status, what to change, traceback or stderr."""
        lines = [f"{self.who[0].upper()}{self.who[1:]} {self.what}" + ("" if self.what.endswith(ENDS) else ".")]
        is_said = self.exception is None or self.kind in ("command", "agent", "agent_ended", "signal", "oom")
        if self.exit_code is not None and not is_said:
            lines.append(f"It {describe_exit(self.exit_code)}.")
        lines += [self.advice] if self.advice else []
        if self.detail and self.kind not in _TELLING:
            lines.append(f"Last lines of its {'output' if self.kind == 'command' else 'stderr'}:")
        # Metaflow's console strips leading spaces; behind the bar the indentation survives.
        return "\n".join([*lines, *(f"  | {line}" for line in self.detail.splitlines())])


@dataclass(frozen=True)
class FailureText:
    """The text of an error: its cause, and what stands around the cause's own report."""

    cause: Cause
    before: str = ""
    after: str = ""
    instead: str | None = None  # of the cause's own report

    @property
    def who(self) -> str:
        """The failed worker or node, within a sentence."""
        who = self.cause.who
        return f"{who[0].lower()}{who[1:]}"

    @property
    def text(self) -> str:
        """The whole text."""
        return self._with(self.cause.describe())

    def without_detail(self) -> str:
        """Return the text without the traceback or output, for a log that shows those already."""
        report = replace(self.cause, detail="").describe()
        if self.cause.detail and self.cause.kind not in ("step", "call"):
            report += " Its traceback is above." if self.cause.kind == "exception" else " Its output is above."
        return self._with(report)

    def without_report(self) -> str:
        """Return only what to change, for a log that has just shown everything else."""
        return self._with(self.cause.advice).strip()

    def _with(self, report: str) -> str:
        return f"{self.before}{report if self.instead is None else self.instead}{self.after}"


E = TypeVar("E", bound=TorchrunError)


def failed(cls: type[E], failure: FailureText) -> E:
    """Return the error for a failure; its texts have a bounded size, here and on all nodes that it is sent to."""
    failure = replace(failure, cause=failure.cause.bounded())
    error = cls(failure.text, failure.cause.as_dict())
    error._failure = failure
    return error


def failure_of(error: TorchrunError) -> FailureText | None:
    """Return the failure behind an error; None if no node has failed. One that was pickled or stored has only a text."""
    failure: FailureText | None = error._failure
    if failure is None and error.cause is not None:
        told = {each.name: error.cause[each.name] for each in fields(Cause) if each.name in error.cause}
        return FailureText(Cause(**told), instead=error.message)
    return failure


def cause_of(error: TorchrunError | None) -> Cause | None:
    """Return the failure that an error names, or None."""
    failure = None if error is None else failure_of(error)
    return None if failure is None else failure.cause


def retold(error: TorchrunError, cls: type[E], after: str = "") -> E:
    """Return the same error as another class, with more text after it; its cause, events and outputs stay."""
    failure: FailureText = error._failure
    told = failed(cls, replace(failure, after=f"{failure.after}{after}"))
    told.events, told.outputs = error.events, error.outputs
    return told


def describe_exit(code: int) -> str:
    """Return an exit code (negative for a signal) in words."""
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
class Failure:
    """A cause as a node reports it: how long ago it happened, since the nodes' clocks need not agree."""

    cause: Cause
    age_s: float = 0.0


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that the others follow from, or None without any: a consequence may be reported before it."""
    return min(failures, key=lambda each: (each.cause.is_consequence, -each.age_s), default=None)


# --- what to change -----------------------------------------------------------------------------

# What argparse, click and their kin end with where they refuse the arguments (Python 3.10 to 3.14).
_REFUSED = 2
# What stderr has after an abort, and what to change.
_ABORTS = (
    # gloo, at the interpreter's exit, if a DistributedDataParallel object outlives the process group (torch 2.13, 2.14).
    (
        "terminate called without an active exception",
        "If that was at the script's very end: delete the DDP model and call gc.collect() before destroy_process_group().",
    ),
    ("collective mismatch", "The ranks called different collectives: do all ranks make the same number of steps?"),
)


def remedy_of_exit(code: int | None, bools: Sequence[tuple[str, bool]], stderr: str = "") -> str:
    """Return what to change where a script has ended with this code, and got these arguments as True or False.

    `stderr` is the end of what it wrote there.
    """
    if code == -signal.SIGABRT:
        return next((text for words, text in _ABORTS if words in stderr), "")
    if code is None or code <= 0:
        return ""
    if code != _REFUSED or not bools:
        found = f"Look for sys.exit({code}) or os._exit({code}) in it, and let it say why before."
        return "" if stderr.strip() else f"It wrote nothing to stderr. {found}"
    name, value = next((pair for pair in bools if pair[1]), bools[0])
    option = name if name.startswith("-") else f"--{name}"
    return (
        f"If it has refused its arguments: { ({name: value})!r} in entrypoint_args is passed as two words, {option} "
        f"{str(value).lower()}. Write { ({name: None})!r} for a flag without a value, and leave out a flag that is not set."
    )
