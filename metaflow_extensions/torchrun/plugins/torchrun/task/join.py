"""Joins a gang: as the control node, as another member, or alone. Everything here runs in the step's thread."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..compat.renamed import harmless
from ..errors import CLASSES, GangError, GangStartTimeout, TorchrunConfigError, TorchrunPreempted
from ..gang.limits import QUIET_S, REMIND_S
from ..gang.messages import CONTROL, Abort, Farewell, Join
from ..gang.view import GangView, Word
from ..gang.wire import Plain
from ..machine.accelerators import Machine, Nproc, choose_nproc
from ..machine.network import addresses_for_others
from ..registry import AddressRecord, Registry, growing_pauses
from ..settings import StepSettings
from ..supervisor.command import command_environment, with_hooks
from .link import Link
from .member import Member

LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_S = 0.2  # if all nodes start at once, the control node's record is there after one pause
_ANSWER_S = 60.0  # for a control node that does not answer, beyond the time limits of the channel
NOTHING: Mapping[str, Any] = {}


# --- alone, and as the control node ---------------------------------------------------------------


def begin_gang(
    settings: StepSettings,
    more: Mapping[str, Any] = NOTHING,
    rules: Mapping[str, Any] = NOTHING,
    num_nodes: int = 1,
    token: str = "",
) -> Member:
    """Return the control node as a member; `rules` are fields of `Rules`. In a gang of one nothing listens."""
    given = {
        "started_timeout_s": settings.all_nodes_started_timeout,
        "grace_s": settings.grace_s,
        "name": secrets.token_hex(4),
        "spare_nodes": settings.spare_nodes,
        "min_nodes": settings.min_nodes,
        **rules,
    }
    member = begin(CONTROL, num_nodes, settings, more, {"token": token, "rules": given})
    member.send(Join(CONTROL, member.host))
    return member


def begin(
    node: int,
    num_nodes: int,
    settings: StepSettings,
    more: Mapping[str, Any] = NOTHING,
    of_control: Mapping[str, Any] = NOTHING,
) -> Member:
    """Return a node that has not joined yet as a member; `more` is what its supervisor looks at, and its spares."""
    member = Member(node, num_nodes, Link(settings.grace_s))
    about = {"num_nodes": num_nodes, "timeout_s": settings.heartbeat_timeout_s, "more": dict(more)}
    member.link.send("begin", {**about, **(of_control or {"node": node})})
    return member


def starts_of(settings: StepSettings, machine: Machine, requested: Nproc | None) -> Plain | None:
    """Return what the spare of a step's first launch is, for `supervisor.warm`; None if `warm` is off, or if this has failed.

    The spare gets the launch's environment, as far as it is known before `run` is called. `requested` is what the
    resources of a task amount to.
    """
    if settings.warm == "off":
        return None
    with harmless():  # all starts are cold then
        nproc = 1
        with suppress(TorchrunConfigError):  # `run` raises it
            nproc = choose_nproc(settings.nproc_per_node, "nproc_per_node", requested, machine).value
        env = with_hooks(command_environment(machine, nproc, {}, os.environ), None)
        workers = nproc if settings.warm == "workers" else 0
        return {"preload": settings.preload, "env": env, "workers": workers}
    return None


def open_gang(member: Member, registry: Registry, main_ip: str | None, settings: StepSettings, token: str) -> str:
    """Open the gang's channel, publish its addresses, and return the control node's.

    `main_ip` is its address or name as Metaflow knows it; None if all nodes run on this machine: then the channel accepts
    connections only from it.
    """
    is_alone, port = member.num_nodes == 1, 0
    addresses = [LOOPBACK] if main_ip is None or is_alone else addresses_for_others(main_ip)
    try:
        if not is_alone:
            port = member.link.call("listen", settings.channel_port, LOOPBACK if main_ip is None else "")
    finally:  # also after an error, which the others then find in what is stored of the gang
        if main_ip is not None or not is_alone:
            with member.link.ours():  # as below
                registry.save(AddressRecord(tuple(addresses), port, token, member.host))
    member.raise_news()
    return addresses[0]


def refuse_second_run(registry: Registry, num_nodes: int) -> None:
    """Raise if another task was the control node of this attempt before: this one has come in its place.

    The step's code would run twice in one attempt, and overwrite what is recorded and stored of the first run.
    """
    # If the datastore fails here, it can't be known whether there was one. Publishing would fail, too.
    former = registry.load(AddressRecord)
    if former is None:
        return
    error = TorchrunPreempted(
        f"The control node's pod (or container) was deleted or replaced: this task (host {socket.gethostname()}) has come "
        f"in the place of node {CONTROL} (host {former.host}). It does not run the step's code, which has run already in "
        "this attempt. What is recorded and stored of the first gang stays. " + TorchrunPreempted.remedy
    )
    with suppress(GangError):  # the error itself is in this task's log
        registry.save_word(Word(error.message, time.time(), num_nodes), "replacement")
    raise error


# --- as another member ----------------------------------------------------------------------------


def connect(member: Member, registry: Registry, settings: StepSettings) -> str:
    """Find the control node, become a member of its gang, and return the address that worked; log what it waits for."""
    timeout_s, now = settings.all_nodes_started_timeout, time.monotonic()
    deadline, log_at = now + timeout_s, now + QUIET_S
    for pause_s in growing_pauses(_FIRST_PAUSE_S):
        with member.link.ours():  # a signal that raised in a store's client would be swallowed there
            record = registry.load(AddressRecord)  # each time: a new control node may write another
        member.raise_news()
        left_s, is_last = max(1.0, deadline - time.monotonic()), time.monotonic() + pause_s > deadline
        if record is not None:
            address = [list(record.addresses), record.port, record.token, left_s]
            patience_s = left_s + settings.heartbeat_timeout_s + _ANSWER_S
            try:
                return str(member.link.call("connect", *address, patience_s=patience_s))
            except OSError as error:
                with member.link.ours():
                    view = registry.load_view()
                if view is not None and view.is_over:
                    _after_end(member, view)
                    return record.addresses[0]
                if is_last:
                    raise _unreached(member, record, timeout_s, error) from error
                text = f"can't join yet: {error}"
        elif is_last:
            raise GangStartTimeout(
                f"Waited {timeout_s:g} s, but node 0 (the control node) did not arrive: it wrote no address for "
                f"{registry.where}. Look at the control task's log. @torchrun(all_nodes_started_timeout=...) changes how "
                "long to wait."
            )
        else:
            text = "waits for node 0 (the control node) to start"
        if time.monotonic() >= log_at:
            log_at = time.monotonic() + REMIND_S
            member.note(text)
        member.link.wait(bool, pause_s)
    raise AssertionError("the pauses never end")


def _after_end(member: Member, view: GangView) -> None:
    """Raise the gang's error, or end this task if it has come in the place of one that was in the gang."""
    if view.nodes[CONTROL].state != "finished":
        cls = CLASSES.get(view.reports[-1].error or "", GangError) if view.reports else GangError
        member.deliver(Abort(cls(view.error or "The gang has ended.", view.cause)))
        member.raise_news()
    if view.nodes[member.node].state != "not joined yet":
        member.note("the gang has ended well without this task; it has nothing to do")
        sys.stdout.flush()
        os._exit(0)  # Metaflow would store results otherwise, also over those that the node has stored before
    member.deliver(Farewell("bye"))  # the control node's step launched nothing and has ended well


def _unreached(member: Member, record: AddressRecord, timeout_s: float, error: OSError) -> GangError:
    return GangError(
        f"Node {member.node} (host {member.host}) can't reach the control node: tried {', '.join(record.addresses)} on port "
        f"{record.port} for {timeout_s:g} s; the last try failed: {error}. Look whether its task has ended. If not, check "
        "that network policies and security groups let the nodes connect to each other; @torchrun(channel_port=...) pins "
        "the port."
    )
