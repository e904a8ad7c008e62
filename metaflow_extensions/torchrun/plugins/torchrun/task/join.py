"""Joins a gang: as the control node, as another member, or alone. Everything here runs in the step's thread."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..errors import GangError, TorchrunError, TorchrunPreempted
from ..events import Event, Subscriber
from ..gang.limits import QUIET_S, REMIND_S
from ..gang.messages import CONTROL, Farewell, Join
from ..gang.policy import ConnectPolicy, Rules, growing_pauses
from ..gang.view import Presence, Word
from ..gang.wire import from_plain
from ..launch.transfer import Step, Transfer
from ..machine.network import addresses_for_others, place
from ..registry import STORE_PATIENCE_S, AddressRecord, Registry
from ..settings import StepSettings
from .link import Link
from .member import Member
from .step_timeout import alarm_text

LOOPBACK = "127.0.0.1"
_POLICY = ConnectPolicy()
_LAST_RECORD_S = 5.0  # how long the control node tries to publish how it ended
# The part of all_nodes_started_timeout that the control node may take to publish where it is.
_PUBLISH_PART = 0.8
_ANSWER_S = 60.0  # for a control node that does not answer, beyond the time limits of the channel
NOTHING: Mapping[str, Any] = {}


def end_at_once() -> None:
    """End this process well. Metaflow would store results otherwise, also over those that the node has stored before."""
    sys.stdout.flush()
    os._exit(0)


def control_addresses(main_ip: str, here_only: bool) -> list[str]:
    """Return the control node's addresses in the order in which to try them; there is at least one."""
    return [LOOPBACK] if here_only else addresses_for_others(main_ip)


# --- alone, and as the control node ---------------------------------------------------------------


def rules_of(settings: StepSettings) -> Rules:
    """Return the rules of a gang."""
    return Rules(
        settings.all_nodes_started_timeout,
        settings.grace_s,
        secrets.token_hex(4),
        spare_nodes=settings.spare_nodes,
        min_nodes=settings.min_nodes,
    )


def join_alone(settings: StepSettings, emit: Subscriber, rules: Rules, more: Mapping[str, Any] = NOTHING) -> Member:
    """Return the only member of a gang of one node: nothing listens, nothing is published."""
    return _begin_gang(1, settings, emit, "", rules, more)


def join_as_control(
    registry: Registry,
    num_nodes: int,
    main_ip: str,
    settings: StepSettings,
    emit: Subscriber,
    here_only: bool,
    rules: Rules,
    more: Mapping[str, Any] = NOTHING,
) -> Member:
    """Open the gang's channel, publish where it is, and return the control node as a member.

    `main_ip` is the control node's address or name as Metaflow knows it. With `here_only` all nodes run on this
    machine, and the channel accepts connections only from it.
    """
    # Less than the gang's own limit: otherwise the error would blame nodes that could not find the address.
    patience_s = min(STORE_PATIENCE_S, _PUBLISH_PART * settings.all_nodes_started_timeout)
    if not here_only:  # there the same task can be run again by hand
        refuse_second_run(registry, num_nodes, patience_s)
    record = AddressRecord(tuple(control_addresses(main_ip, here_only)), 0, secrets.token_hex(32), socket.gethostname())
    address = _PublishedAddress(registry, record, rules.replaces)
    member = _begin_gang(num_nodes, settings, emit, address.record.token, rules, more)
    member.at_end = lambda: address.close(member)
    try:
        port = member.link.call("listen", settings.channel_port, LOOPBACK if here_only else "")
        with member.link.ours():  # as in `_Search.connect`
            address.publish(port, patience_s)
        member.raise_news()
    except BaseException as error:
        member.leave(error)
        raise
    return member


def _begin_gang(
    num_nodes: int,
    settings: StepSettings,
    emit: Subscriber,
    token: str,
    rules: Rules,
    more: Mapping[str, Any],
) -> Member:
    given = {name: value for name, value in vars(rules).items() if name != "why_it_waits"}
    about = {"num_nodes": num_nodes, "timeout_s": settings.heartbeat_timeout_s, "token": token, "rules": given}
    link = Link(settings.grace_s)
    member = Member(CONTROL, num_nodes, emit, link, alarm_text(settings.grace_s))
    link.send("begin", {**about, "more": dict(more)})
    member.send(Join(CONTROL, member.host, place=place()))
    return member


def refuse_second_run(registry: Registry, num_nodes: int, patience_s: float = STORE_PATIENCE_S) -> None:
    """Raise if another task was the control node of this attempt before: this one has come in its place.

    The step's code would run twice in one attempt, and overwrite what is recorded and stored of the first run.
    """
    # If the datastore fails here, it can't be known whether there was one. Publishing would fail, too.
    former = registry.peek(patience_s)
    if former is None:
        return
    error = TorchrunPreempted(
        f"The control node's pod (or container) was deleted or replaced: this task (host {socket.gethostname()}) has come "
        f"in the place of node {CONTROL} (host {former.host}). It does not run the step's code, which has run already in "
        "this attempt. What is recorded and stored of the first gang stays. " + TorchrunPreempted.remedy
    )
    with suppress(GangError):  # the error itself is in this task's log
        registry.save_word(Word(error.message, time.time(), num_nodes), "replacement", _LAST_RECORD_S)
        registry.publish(replace(former, closed=True, error=former.error or error), _LAST_RECORD_S)
    raise error


class _PublishedAddress:
    """Where the control node is, as the datastore has it for the other nodes."""

    def __init__(self, registry: Registry, record: AddressRecord, may_come_late: bool) -> None:
        self._registry, self.record = registry, record
        self._may_come_late = may_come_late  # whether tasks may come in the place of others

    def publish(self, port: int, patience_s: float) -> None:
        """Publish the address with the port on which the channel listens."""
        self.record = replace(self.record, port=port)
        self._registry.publish(self.record, patience_s)

    def close(self, member: Member) -> None:
        """Publish the control node's end for tasks that have not arrived, so that none waits for it."""
        states: Mapping[str, Any] = {"states": [Presence.ABSENT.name], "broken": None}
        with suppress(GangError, OSError):
            states = member.link.call("states")
        absent = Presence.ABSENT.name in states["states"]
        if absent or self._may_come_late:
            found = states["broken"]
            error = member.broken if found is None else from_plain(TorchrunError, found, "the error")
            last = replace(self.record, closed=True, error=error, is_over=not error and not absent)
            with suppress(RuntimeError, OSError):  # without this record they wait until their time is up
                publish = partial(self._registry.publish, last, _LAST_RECORD_S)
                job = Transfer(None, "stores", [Step("the control node's end", publish, _LAST_RECORD_S)])
                job.start()
                job.await_end()


# --- as another member ----------------------------------------------------------------------------


def join_as_member(
    registry: Registry,
    node: int,
    num_nodes: int,
    settings: StepSettings,
    emit: Subscriber,
    more: Mapping[str, Any] = NOTHING,
) -> tuple[Member, str]:
    """Find the control node, join, and return this node as a member, and the address that worked."""
    member = _member(node, num_nodes, settings, emit, more)
    search = _Search(member, settings.all_nodes_started_timeout, settings)

    def find(left_s: float) -> AddressRecord:
        record = registry.look_up(left_s, search.wait)
        if record.error is not None:
            raise record.error
        if record.is_over:
            member.say(Event("note", node, "the gang has ended well without this task; it has nothing to do"))
            end_at_once()
        if record.closed:  # the control node's step launched nothing and has ended well
            member.deliver(Farewell("bye"))
        return record

    with _leave_if_it_fails(member):
        try:
            address = search.connect(find)
        except OSError as error:
            raise GangError(
                f"Node {node} (host {member.host}) can't reach the control node: {error}. Check that network policies and "
                "security groups let the nodes connect to each other; @torchrun(channel_port=...) pins the port."
            ) from error
    return member, address


def _member(
    node: int, num_nodes: int, settings: StepSettings, emit: Subscriber, more: Mapping[str, Any] = NOTHING
) -> Member:
    about = {"node": node, "num_nodes": num_nodes, "timeout_s": settings.heartbeat_timeout_s, "place": place()}
    member = Member(node, num_nodes, emit, Link(settings.grace_s), alarm_text(settings.grace_s))
    member.link.send("begin", {**about, "policy": asdict(_POLICY), "more": dict(more)})
    return member


@contextmanager
def _leave_if_it_fails(member: Member) -> Iterator[None]:
    """Leave the gang with an error; a node that has come to replace another waits for the gang's end, and says so."""
    try:
        yield
    except BaseException as error:
        if member.hold_s:
            text = f"{error} It waits until the gang has ended, {member.hold_s:g} s at most."
            member.say(Event("failed", member.node, text))
        member.leave(error, hold_s=member.hold_s)
        raise


class _Search:
    """Tries to become a member for `timeout_s` seconds, and logs what it waits for."""

    def __init__(self, member: Member, timeout_s: float, settings: StepSettings) -> None:
        self._member, self._patience_s = member, settings.heartbeat_timeout_s + _ANSWER_S
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._log_at = time.monotonic() + QUIET_S
        self._refused: AddressRecord | None = None  # for whose host all connections are refused, without a break
        self._since = 0.0

    def connect(self, find: Callable[[float], AddressRecord]) -> str:
        """Become a member, or raise OSError; return the address that worked. `find` takes the seconds that are left."""
        for pause_s in growing_pauses():
            with self._member.link.ours():  # a signal that raised in a store's client would be swallowed there
                record = find(self._left_s())  # each time: a new control node may have written another
            self._member.raise_news()
            if record.closed:
                return record.addresses[0]
            try:
                left_s = self._left_s()
                address = [list(record.addresses), record.port, record.token, left_s]
                return str(self._member.link.call("connect", *address, patience_s=left_s + self._patience_s))
            except OSError as error:
                self._check_refused(error, record)
                self._log(f"can't join yet: {error}")
                if time.monotonic() + pause_s > self._deadline:
                    tried = f"tried {', '.join(record.addresses)} on port {record.port} for {self._timeout_s:g} s"
                    raise ConnectionError(f"{tried}; the last try failed: {error}") from error
            self.wait(pause_s, says_so=False)
        raise AssertionError("the pauses never end")

    def _left_s(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def wait(self, seconds: float, says_so: bool = True) -> None:
        """Wait; perhaps say that it is for the control node's address record."""
        self._member.link.wait(lambda: False, seconds)
        if says_so:
            self._log(f"waits for node {CONTROL} (the control node) to start")

    def _log(self, text: str) -> None:
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + REMIND_S
            self._member.say(Event("note", self._member.node, text))

    def _check_refused(self, error: OSError, record: AddressRecord) -> None:
        """Raise when a host has refused connections for too long."""
        if not isinstance(error, ConnectionRefusedError):
            self._refused = None
            return
        if record != self._refused:
            self._refused, self._since = record, time.monotonic()
        limit_s = _POLICY.refused_here_s if record.addresses == (LOOPBACK,) else _POLICY.refused_s
        where = f"node 0 (the control node) refuses connections at {', '.join(record.addresses)}, port {record.port}"
        if time.monotonic() - self._since >= limit_s:
            raise GangError(
                f"Node {self._member.node} (host {self._member.host}) gave up: {where}, for {limit_s:g} s. That port was "
                "open once, so its task has ended unexpectedly. Look at its log, and at the events of its pod or job."
            )
        self._log(f"{where}: its task may have ended; trying for {limit_s:g} s in all")
