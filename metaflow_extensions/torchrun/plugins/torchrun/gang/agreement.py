"""Compares what the nodes report in *ready*: what must be the same on all, and which accelerators their workers see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import GangError
from .messages import Ready
from .texts import counted, first_values, names

# What must be the same on every node, and its name for the error: fields of *ready*, or among its facts.
_MUST_AGREE = {
    "launch": "launch number",
    "devices": "kind of accelerators",
    "nproc": "processes per node",
    "torch": "torch version",
    "python": "Python version",
    "digest": "entrypoint and torchrun options",
    "contents": "contents of the entrypoint",
}
# What to change, for those where the error would not say it.
_REMEDIES = {
    "devices": " Without accelerators a node would compute on its CPU and hold up the others: look at what it was given, and "
    "at CUDA_VISIBLE_DEVICES there. run(env={'CUDA_VISIBLE_DEVICES': ''}) on every node lets all compute on CPUs."
}


def contradiction(ready: Mapping[int, Ready]) -> GangError | None:
    """Return the error if the nodes' settings or software differ, with nodes and values; else None."""
    for key, name in _MUST_AGREE.items():
        values = _by_value({node: getattr(own, key, own.facts.get(key)) for node, own in ready.items()})
        if len(values) > 1 and not (key == "devices" and _is_one_kind(ready)):
            listed = first_values([f"{names(nodes)}: {value}" for value, nodes in values.items()])
            return GangError(
                f"The nodes differ in the {name} ({listed}). Every node must call current.torch.run in the same order "
                "with the same settings, on the same software and kind of devices." + _REMEDIES.get(key, "")
            )
    return None


def devices(ready: Mapping[int, Ready]) -> str:
    """Return which accelerators the workers see, and on which nodes, for the log; empty if there are none."""
    seen, said = _accelerators(ready), []
    for what, nodes in seen.items():
        count, _, kind = (what or "").partition(" ")
        if kind:
            text = counted(int(count), "accelerator" if kind == "unknown" else f"{kind} accelerator")
            said.append(f"{text} on {names(nodes) if len(seen) > 1 else 'each node'}")
    return ", ".join(said)


def without_devices(ready: Mapping[int, Ready]) -> list[int]:
    """Return which nodes have no accelerators for their workers, where others do."""
    seen = _accelerators(ready)
    return seen.get("none", []) if len(seen) > 1 else []


def _accelerators(ready: Mapping[int, Ready]) -> dict[str | None, list[int]]:
    """Return the nodes by what their workers see: ``"8 nvidia"``, ``"none"``, or None if not reported."""
    return _by_value({node: own.facts.get("accelerators") for node, own in ready.items()})


def _by_value(found: Mapping[int, Any]) -> dict[Any, list[int]]:
    values: dict[Any, list[int]] = {}
    for node, value in sorted(found.items()):
        values.setdefault(value, []).append(node)
    return values


def _is_one_kind(ready: Mapping[int, Ready]) -> bool:
    """Return whether all workers see the same kind of accelerators, even if the nodes' own kinds differ."""
    seen = _accelerators(ready)
    return None not in seen and len({str(each).partition(" ")[2] for each in seen}) == 1
