"""The log lines with which a launch begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import TorchrunError
from ..gang.cause import failure_of
from ..gang.messages import Go
from ..gang.texts import counted, duration, headline
from .call import Call

_FIRST_LAUNCH = "\nthe first output can take half a minute, since each process imports PyTorch first"

# The classes of causes with which nothing has failed where they arise.
_NO_FAILURE = frozenset({"preempted", "interrupted", "timeout", "store"})


def start_line(call: Call, go: Go) -> str:
    """Return which ranks a launch starts, and where."""
    processes = f"{call.nproc} process{'' if call.nproc == 1 else 'es'}"
    where = f" on {counted(call.group_size, 'node')}, {processes} on each" if call.group_size > 1 else ""
    devices = f"; {go.devices}" if go.devices else ""
    first = _FIRST_LAUNCH if go.launch == 0 else ""
    return f"launch {go.launch} starts {_ranks(call)}{where}{devices}{first}"


def end_line(launch: int, call: Call, seconds: float, restarts: int, error: TorchrunError | None) -> str:
    """Return how a launch has ended; `seconds` are those from *go* to its end."""
    trained = f"trained {duration(seconds)}" + (f", {counted(restarts, 'restart')}" if restarts else "")
    failure = None if error is None else failure_of(error)
    if failure is not None and failure.cause.kind not in ("hang", "timeout"):
        is_told = failure.cause.category in _NO_FAILURE
        how = headline(failure.cause.what) if is_told else "failed first"
        return f"launch {launch} has failed ({trained}): {failure.who} {how}"
    return f"launch {launch} {'has ended well' if error is None else 'has failed'}: {_ranks(call)}, {trained}"


def alone_line(launch: int, call: Call) -> str:
    """Return the warning for a launch whose ranks have trained without a process group, and what to change.

    A process group alone would change nothing but this warning.
    """
    group = (
        "after torch.distributed.init_process_group()" if call.function is None else "with run(process_group='auto')"
    )
    return (
        f"warning: in launch {launch} each of the {call.world_size} ranks has trained by itself: gradients were "
        "computed, but no process group was made for them, so each has a model of its own. That is fine if you mean it. "
        f"If not: {group}, wrap the model in DistributedDataParallel (or FSDP), and give its DataLoader a "
        "DistributedSampler. Without GPUs, Hugging Face's Trainer needs TrainingArguments(use_cpu=True), and Accelerate "
        "needs Accelerator(cpu=True)"
    )


def left_behind_line(left: Sequence[str], who: str) -> str:
    """Return what is logged of processes that workers or commands had left running."""
    return f"stopped processes that the {who} had left running: {', '.join(left)}"


def _ranks(call: Call) -> str:
    return "rank 0" if call.world_size == 1 else f"ranks 0-{call.world_size - 1}"
