"""What the control node says of a launch, each in one line: at its begin the facts, at its end what came of it."""

from __future__ import annotations

from ..errors import TorchrunError
from ..gang.protocol import Go
from ..gang.texts import counted
from ..launch.spec import LaunchSpec, bracketed
from .plan import Plan


def facts_line(plan: Plan, go: Go) -> str:
    """Return what the workers start with: nodes, ranks, devices, and where the rendezvous of their backend is."""
    spec = plan.spec
    why = f" ({plan.nproc_why})" if plan.nproc_why else ""
    return (
        f"launch {go.launch} starts on {counted(spec.num_nodes, 'node')}: {_ranks(spec)}; "
        f"processes per node: {spec.nproc}{why}; {_devices(plan)}; rendezvous at {bracketed(plan.main_addr)}:{go.port}"
    )


def end_line(launch: int, spec: LaunchSpec, seconds: float, restarts: int, error: TorchrunError | None) -> str:
    """Return how a launch has ended."""
    how = "has ended well" if error is None else "has failed"
    again = counted(restarts, "restart") if restarts else "no restart"
    return f"launch {launch} {how}: {_ranks(spec)}, {seconds:.1f} s, {again}"


def alone_line(launch: int, plan: Plan) -> str:
    """Return the warning for a launch whose ranks have trained without a process group, and what to change."""
    own = "init_process_group()" if plan.call is None else "run(init='auto')"
    return (
        f"warning: in launch {launch} each of the {plan.spec.world_size} ranks has trained by itself: gradients were "
        "computed, but no process group was made for them. That is fine if you mean it. If not: where there are no GPUs, "
        "Hugging Face's Trainer needs TrainingArguments(use_cpu=True) and Accelerate needs Accelerator(cpu=True), or "
        f"both run(env={{'ACCELERATE_USE_CPU': 'true'}}); a training loop of your own needs {own}"
    )


def _ranks(spec: LaunchSpec) -> str:
    return "rank 0" if spec.world_size == 1 else f"ranks 0-{spec.world_size - 1}"


def _devices(plan: Plan) -> str:
    machine, kind = plan.machine, str(plan.facts.get("devices", "none"))
    count = len(machine.own_accelerators or machine.accelerators)
    if count == 0:
        return "no accelerators"
    name = "accelerator" if kind in ("none", "unknown") else f"{kind} accelerator"
    return f"{counted(count, name)} on each node"
