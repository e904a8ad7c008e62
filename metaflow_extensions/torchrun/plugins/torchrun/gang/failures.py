"""The errors of a gang: for launches that can't begin, and launches that fail. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import (
    GangError,
    GangStartTimeout,
    LaunchFailed,
    LaunchHung,
    LaunchTimeout,
    TorchrunPreempted,
)
from ..texts import counted, duration, first_values, headline, names, shortened
from .cause import CATEGORY_TEXTS, Cause, FailureText, failed
from .launch import GONE, Launch
from .limits import ALIKE_ENDS, ALIKE_S
from .messages import CONTROL, Ready

# Kinds of causes that no node reports as its failure.
_FOUND_BY_CONTROL = ("timeout", "step_timeout", "hang", "unreachable")


# --- a failure in one line ------------------------------------------------------------------------


def summary(cause: Cause) -> str:
    """Return who failed and how in one line."""
    return headline(f"{cause.who} {cause.what}")


def teller(cause: Cause | None) -> int:
    """Return the node whose log has the full report: the failed one, unless it is lost or the control node found out."""
    if cause is not None and (cause.kind, cause.node) == ("lost", CONTROL):
        return CONTROL + 1  # the control node itself can't tell any more
    return CONTROL if cause is None or cause.kind in ("lost", *_FOUND_BY_CONTROL) else cause.node


def reason(cause: Cause | None) -> str:
    """Return who failed and how in one line, for the logs; empty if the control node has logged it already."""
    is_logged = cause is None or (cause.node == CONTROL and cause.kind not in _FOUND_BY_CONTROL)
    return "" if cause is None or is_logged else summary(cause)


def change_of_nodes(left: Collection[int], came: Collection[int], size: int) -> str:
    """Return in words which nodes take part after a restart; empty if they are the same. One may have left and come again."""
    again, gone, new = (sorted(each) for each in ({*left} & {*came}, {*left} - {*came}, {*came} - {*left}))
    said = [f"{names(again)} {'is' if len(again) == 1 else 'are'} started again"] if again else []
    if new:
        takes = "a spare, takes the place" if len(new) == 1 else "spares, take the places"
        said.append(f"{names(new)}, {takes} of {names(gone) if gone else 'those that were lost'}")
    elif gone:
        said.append(f"the launch goes on without {names(gone)}, on {counted(size, 'node')}")
    return "; ".join(said)


# --- nodes that don't agree ----------------------------------------------------------------------

_NONE = "none"  # no accelerators
# What must be the same on every node, and its name for the error: fields of *ready*, or among its facts.
_MUST_AGREE = {
    "launch": "launch number",
    "devices": "accelerators",
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
        find = _kind if key == "devices" else lambda own, key=key: getattr(own, key, own.facts.get(key))
        values: dict[Any, list[int]] = {}
        for node, own in sorted(ready.items()):
            values.setdefault(find(own), []).append(node)
        if len(values) > 1:
            listed = first_values([f"{names(nodes)}: {value}" for value, nodes in values.items()])
            return GangError(
                f"The nodes differ in the {name} ({listed}). Every node must call current.torch.run in the same order "
                "with the same settings, on the same software and kind of devices." + _REMEDIES.get(key, "")
            )
    return None


def _kind(ready: Ready) -> str:
    """Return whether the workers see accelerators, of which each node may have another number."""
    return _NONE if ready.facts.get("devices", _NONE) == _NONE else "some"


# --- a launch that can't begin, and failures outside of launches ----------------------------------


def missing(absent: Sequence[int], num_nodes: int, waited_s: float, command: str = "") -> GangStartTimeout:
    """Return the error for nodes that did not come in time; `command` shows why the first did not, or is empty."""
    return GangStartTimeout(
        f"Waited {waited_s:g} s, but {names(absent)} of {num_nodes} did not arrive. Look at the logs of these tasks: "
        "they may wait for machines, fail to pull their image, or not reach the control node. "
        f"@torchrun(all_nodes_started_timeout=...) changes how long to wait.{to_see_why(absent[0], command)}"
    )


def to_see_why(node: int, command: str) -> str:
    """Return the sentence with the command that shows why a node is missing; empty without a command."""
    return f" To see why node {node} is missing: {command}" if command else ""


def step_has_ended(number: int, gone: Sequence[int]) -> GangError:
    """Return the error for a launch that some nodes will never call."""
    return GangError(
        f"Launch {number} can't begin: the step's code has already ended on {names(gone)}. Every node must call "
        "current.torch.run the same number of times."
    )


def port_taken(port: int | None, host: str) -> GangError:
    """Return the error for a pinned port that another program uses."""
    return GangError(
        f"Port {port} is taken on the control node (host {host}). Pin another with master_port, or leave it out: the "
        "kernel then chooses a free one."
    )


def outside(cause: Cause, launch: int | None, after_step: bool, more: str) -> LaunchFailed:
    """Return the error for a node that failed while no launch ran, or before one began; `more` stands at the end."""
    cls = {"preempted": TorchrunPreempted, "timeout": LaunchTimeout}.get(cause.category, LaunchFailed)
    before = "before_run failed, so no worker was started.\n" if cause.kind == "command" else ""
    when = "after the step's code, before its results were stored" if after_step else "outside of current.torch.run"
    when = "in the call of current.torch.run" if cause.kind == "call" else when
    when = f"{when}; all nodes were stopped" if launch is None else f"before launch {launch} began"
    return failed(cls, FailureText(cause, before=before, after=f"\nIt happened {when}.{more}"))


def told_to_end(cause: Cause) -> LaunchFailed:
    """Return what `run` raises on a node without which the others go on."""
    cls = TorchrunPreempted if cause.category == "preempted" else LaunchFailed
    return failed(cls, FailureText(cause, after=" The other nodes go on without it, if enough are left."))


def unreached(host: str, address: str, port: int, why: str) -> tuple[str, str]:
    """Return why a node can't reach torch's store on the control node's `host`, and what to change."""
    where = f"torch's store on node {CONTROL} (host {host}): tried {address} on port {port}"
    advice = (
        f"Open TCP port {port} between the nodes (network policy, security group, firewall), or pin a port that is open by "
        "@torchrun(master_port=...)."
    )
    return f"can't reach {where}: {why}", advice


# --- a launch that fails --------------------------------------------------------------------------


def of_launch(launch: Launch, cause: Cause | None, more: str = "") -> LaunchFailed:
    """Return what every node raises after a failed launch; `more` stands at the end."""
    if cause is None:
        return LaunchFailed(f"Launch {launch.number} failed.{more}")
    cls, failure = _class_and_text(launch, cause)
    return failed(cls, replace(failure, after=failure.after + more))


def _class_and_text(launch: Launch, cause: Cause) -> tuple[type[LaunchFailed], FailureText]:
    stopped = f"Launch {launch.number} was stopped"
    everywhere = f"{stopped} on all nodes"
    if cause.kind == "timeout":
        remedy = "run(timeout_s=...) and the step's @timeout change how long it may run."
        return LaunchTimeout, FailureText(cause, instead=f"{stopped}: it ran {cause.exception}. {remedy}")
    if cause.kind == "hang":
        return LaunchHung, FailureText(cause, instead=f"{stopped}: {cause.exception}. {cause.advice}\n{cause.detail}")
    if cause.kind == "store":
        remedy = "If the datastore is well, return less, or name less as outputs: a script can store results itself."
        return LaunchFailed, FailureText(cause, after=f"\n{everywhere}; its workers had ended well. {remedy}")
    if cause.category == "preempted":
        codes = [pair for ended in launch.ended.values() for pair in ended.exit_codes.items()]
        saved = sorted(rank for rank, code in codes if code == 0)
        in_time = names(saved, "rank") if saved else "no rank"
        after = f"\n{everywhere}. In time, {in_time} exited with code 0.\n{TorchrunPreempted.remedy}"
        return TorchrunPreempted, FailureText(cause, after=after)
    count = f" after {counted(launch.generation, 'restart')}" if launch.generation > 0 else ""
    # The classes are those of `restart_on`, which matters only with restarts.
    kind = f" (class {cause.category})" if launch.policy.max_restarts else ""
    after = f"\n{everywhere}{count}. The reason: {CATEGORY_TEXTS[cause.category]}{kind}."
    after += _about_restarts(launch, cause)
    return LaunchFailed, FailureText(cause, before=_early_hint(launch, cause), after=after)


def _early_hint(launch: Launch, cause: Cause) -> str:
    """Name the ranks that had ended well, if a lost connection is the cause: the others may have waited for them."""
    early = sorted(rank for ended in launch.ended.values() for rank in (ended.exit_codes if ended.ok else ended.early))
    if not early or not cause.is_consequence:
        return ""
    who = f"Rank {early[0]}" if len(early) == 1 else f"Ranks {shortened(early)}"
    return f"{who} had ended with code 0. Do all ranks make the same number of steps?\n"


def _about_restarts(launch: Launch, cause: Cause) -> str:
    """Say why no restart follows, or how to have such a failure restarted where one could have helped."""
    policy, count = launch.policy, launch.repeats[1]
    if policy.max_restarts and count >= ALIKE_ENDS:
        within = f"within {duration(ALIKE_S)} of its start"
        return f" It failed so {count} times in a row, each time {within}, so it is not started again."
    # An error in the user's code, as a rule, comes again.
    is_possible = cause.category in policy.restart_on - GONE - {"user"}
    if policy.max_restarts or not is_possible or launch.given_up or launch.leaving:
        return ""
    return "\nWith max_restarts=N, all workers start again after such a failure, up to N times."
