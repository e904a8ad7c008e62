"""The log lines with which a launch begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import TorchrunError
from ..events import Event
from ..gang.protocol import Go
from ..gang.texts import counted
from ..launch.options import bracketed
from ..launch.spec import LaunchSpec
from .plan import Plan

_FIRST_LAUNCH = (
    "\ntorchrun and the workers import PyTorch first, so the first output can take half a minute; launches (calls of "
    "current.torch.run) count from 0"
)


def facts_line(plan: Plan, go: Go) -> str:
    """Return nodes, ranks, devices and the rendezvous address of a launch."""
    spec = plan.spec
    why = f" ({plan.nproc_why})" if plan.nproc_why else ""
    devices = f"{go.devices}; " if go.devices else ""
    first = _FIRST_LAUNCH if go.launch == 0 else ""
    return (
        f"launch {go.launch} starts on {counted(spec.group_size, 'node')}: {_ranks(spec)}; "
        f"processes per node: {spec.nproc}{why}; {devices}rendezvous at {bracketed(plan.main_addr)}:{go.port}{first}"
    )


def end_line(launch: int, spec: LaunchSpec, seconds: float, restarts: int, error: TorchrunError | None) -> str:
    """Return how a launch has ended."""
    how = "has ended well" if error is None else "has failed"
    again = f"workers restarted {counted(restarts, 'time')}" if restarts else "workers not restarted"
    return f"launch {launch} {how}: {_ranks(spec)}, {seconds:.1f} s, {again}"


def alone_line(launch: int, plan: Plan) -> str:
    """Return the warning for a launch whose ranks have trained without a process group, and what to change.

    A process group alone would change nothing but this warning.
    """
    group = (
        "after torch.distributed.init_process_group()"
        if plan.spec.function is None
        else "with run(process_group='auto')"
    )
    return (
        f"warning: in launch {launch} each of the {plan.spec.world_size} ranks has trained by itself: gradients were "
        "computed, but no process group was made for them, so each has a model of its own. That is fine if you mean it. "
        f"If not: {group}, wrap the model in DistributedDataParallel (or FSDP), and give its DataLoader a "
        "DistributedSampler. Without GPUs, Hugging Face's Trainer needs TrainingArguments(use_cpu=True), and Accelerate "
        "needs Accelerator(cpu=True)"
    )


def left_behind(node: int, left: Sequence[str], who: str) -> list[Event]:
    """Return what is logged of processes that workers or commands had left running."""
    text = f"stopped processes that the {who} had left running: {', '.join(left)}"
    return [Event("left_behind", node, text)] if left else []


def _ranks(spec: LaunchSpec) -> str:
    return "rank 0" if spec.world_size == 1 else f"ranks 0-{spec.world_size - 1}"
