"""How a node takes its seat: as the control node, as a member, or alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .address_book import STORE_PATIENCE_S, Address, AddressBook
from .channel import ControlChannel, MemberChannel, new_token
from .errors import GangError, from_wire, to_wire
from .events import Subscriber
from .gang import Gang, Settings
from .launch_state import CONTROL
from .membership import Membership
from .network import addresses_for_others, free_port, port_is_free
from .settings import StepSettings

LOOPBACK = "127.0.0.1"
# After its own end the control node waits so long for the others', to hear of late failures.
_LEAVE_WAIT_S = 5.0
# The part of all_nodes_started_timeout that the control node may take to publish where it is.
_PUBLISH_PART = 0.8
# How long one address record is tried before it is read again: the control node may have ended.
_TRY_S = 10.0


def pick_port(pinned: int | None) -> int | None:
    """Return the pinned port if it is free, else None; without one, a free port."""
    if pinned is None:
        return free_port()
    return pinned if port_is_free(pinned) else None


def sit_alone(settings: StepSettings, emit: Subscriber) -> Membership:
    """Return the seat of a gang of one node: nothing listens, nothing is published."""
    seat, _ = _open_channel(1, settings, emit, "")
    return seat


def control_addresses(main_ip: str, here_only: bool) -> list[str]:
    """Return the control node's addresses in the order in which to try them; there is at least one.

    Parameters
    ----------
    main_ip : str
        The control node's address or name as Metaflow knows it.
    here_only : bool
        Whether all nodes run on this machine.
    """
    return [LOOPBACK] if here_only else addresses_for_others(main_ip)


def join_as_control(
    book: AddressBook,
    num_nodes: int,
    main_ip: str,
    settings: StepSettings,
    emit: Subscriber,
    here_only: bool,
) -> tuple[Membership, ControlChannel]:
    """Open the gang's channel, publish where it is, and return it with the control node's seat.

    Parameters
    ----------
    book : AddressBook
        Where to publish.
    num_nodes : int
        The gang's size.
    main_ip : str
        The control node's address or name as Metaflow knows it.
    settings : StepSettings
        The step's settings.
    emit : callable
        Takes the events.
    here_only : bool
        Whether all nodes run on this machine, so that the channel listens to nobody else.
    """
    token = new_token()
    seat, channel = _open_channel(num_nodes, settings, emit, token)
    try:
        port = _listen(book, channel, settings, LOOPBACK if here_only else "", token)
        address = Address(tuple(control_addresses(main_ip, here_only)), port, token)
        # Before the gang's own time is up, or the others' absence would be blamed for it.
        book.publish(address, min(STORE_PATIENCE_S, _PUBLISH_PART * settings.all_nodes_started_timeout))
        seat.at_end(lambda: _tell_latecomers(book, address, channel))
    except BaseException as error:
        seat.leave(error)
        raise
    return seat, channel


def _listen(book: AddressBook, channel: ControlChannel, settings: StepSettings, host: str, token: str) -> int:
    """Open the channel; if that can't be, leave word for the others, which would wait for it."""
    try:
        return channel.listen(settings.channel_port, host)
    except GangError as error:
        with suppress(GangError):
            book.publish(Address((), 0, token, closed=True, error=to_wire(error)), _LEAVE_WAIT_S)
        raise


def _tell_latecomers(book: AddressBook, address: Address, channel: ControlChannel) -> None:
    """Leave word for nodes that have not arrived when the control node ends, so that none waits for it."""
    if channel.gang.absent:
        broken = channel.gang.broken
        with suppress(GangError):  # without the word they wait until their time is up
            last = replace(address, closed=True, error=None if broken is None else to_wire(broken))
            book.publish(last, _LEAVE_WAIT_S)


def _open_channel(
    num_nodes: int, settings: StepSettings, emit: Subscriber, token: str
) -> tuple[Membership, ControlChannel]:
    seat = Membership(CONTROL, num_nodes, emit)
    gang_settings = Settings(num_nodes, settings.all_nodes_started_timeout, settings.grace_s, secrets.token_hex(4))
    gang = Gang(gang_settings, pick_port)
    channel = ControlChannel(gang, seat.deliver, token, settings.heartbeat_timeout_s)
    close: Callable[[], None] = lambda: channel.close(_LEAVE_WAIT_S)  # noqa: E731 - bound to this channel
    seat.sit_down(channel, close)
    channel.send({"type": "join", "node": CONTROL, "host": seat.host})
    seat.await_welcome(_LEAVE_WAIT_S)
    return seat, channel


def join_as_member(
    book: AddressBook, node: int, num_nodes: int, settings: StepSettings, emit: Subscriber
) -> tuple[Membership, str]:
    """Find the control node, connect, and return this node's seat and the address that worked.

    Raises
    ------
    GangStartTimeout
        If the control node does not publish its address in time.
    GangError
        If it can't be reached.
    """
    seat = Membership(node, num_nodes, emit)
    channel = MemberChannel(node, seat.deliver, settings.heartbeat_timeout_s)
    seat.sit_down(channel, channel.close)
    try:
        main_addr = _connect(book, channel, seat, settings.all_nodes_started_timeout)
    except BaseException as error:
        seat.leave(error)
        raise
    return seat, main_addr


def _connect(book: AddressBook, channel: MemberChannel, seat: Membership, timeout_s: float) -> str:
    """Look the control node up and connect, for `timeout_s` seconds; each failed try looks it up anew."""
    deadline = time.monotonic() + timeout_s
    while True:
        address = book.look_up(max(1.0, deadline - time.monotonic()), timeout_s)
        if address.error is not None:
            raise from_wire(address.error)
        if address.closed:  # the control node's step launched nothing and has ended well
            seat.deliver({"type": "welcome"})
            seat.deliver({"type": "bye"})
            return address.addresses[0]
        left_s = deadline - time.monotonic()
        try:
            return channel.connect(address.addresses, address.port, address.token, max(1.0, min(left_s, _TRY_S)))
        except GangError:
            if left_s <= _TRY_S or channel.turned_away:
                raise
