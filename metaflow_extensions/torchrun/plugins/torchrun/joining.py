"""How a node takes its seat: as the control node, as a member, or alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .address_book import STORE_PATIENCE_S, Address, AddressBook
from .channel import ControlChannel, MemberChannel, new_token
from .errors import GangError, TorchrunError, from_wire, to_wire
from .events import Event, Subscriber
from .gang import Gang, Settings
from .launch_state import CONTROL, QUIET_S, REMIND_S
from .membership import Membership
from .network import addresses_for_others, free_port, place, port_is_free
from .settings import StepSettings

LOOPBACK = "127.0.0.1"
# After its own end the control node waits so long for the others', to hear of late failures.
_LEAVE_WAIT_S = 5.0
# The part of all_nodes_started_timeout that the control node may take to publish where it is.
_PUBLISH_PART = 0.8
# How long one address record is tried before it is read again: the control node may have ended.
_TRY_S = 10.0
# How long a published address may refuse all connections. The port was open before it was published, so its task has ended;
# only proxies and firewalls that are still being set up do the same for a while, and on one machine there are none.
_REFUSED_S = 60.0
_REFUSED_HERE_S = 5.0
# How long a new control node looks for one that it is to replace.
_FORMER_S = 5.0


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
    if not here_only:
        _give_way_to_former(book, num_nodes, settings, emit)
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


def _give_way_to_former(book: AddressBook, num_nodes: int, settings: StepSettings, emit: Subscriber) -> None:
    """Raise if another task is the control node of this attempt and lives: its pod is being replaced by this one.

    It gets to know so, as it does of members. The address of one that has ended is overwritten: if
    it had no members yet, nothing is lost.
    """
    former = None
    with suppress(GangError):  # publishing will say so, if the datastore stays away
        former = book.peek(_FORMER_S)
    if former is None or former.closed:
        return
    seat, channel = _member(CONTROL, num_nodes, settings, emit)
    try:
        channel.connect(former.addresses, former.port, former.token, _FORMER_S)
    except TorchrunError as error:
        _leave_again(seat, channel, error)
        if channel.turned_away:
            raise


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
    channel.send({"type": "join", "node": CONTROL, "host": seat.host, "place": place()})
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
    seat, channel = _member(node, num_nodes, settings, emit)
    try:
        main_addr = _connect(book, channel, seat, settings.all_nodes_started_timeout)
    except BaseException as error:
        _leave_again(seat, channel, error)
        raise
    return seat, main_addr


def _member(node: int, num_nodes: int, settings: StepSettings, emit: Subscriber) -> tuple[Membership, MemberChannel]:
    seat = Membership(node, num_nodes, emit)
    channel = MemberChannel(node, seat.deliver, settings.heartbeat_timeout_s)
    seat.sit_down(channel, channel.close)
    return seat, channel


def _leave_again(seat: Membership, channel: MemberChannel, error: BaseException) -> None:
    """Leave the seat; one that has come to replace another says why it failed, and waits for the gang's end."""
    if channel.hold_s:
        seat.emit(
            Event("failed", seat.node, f"{error} It waits until the gang has ended, {channel.hold_s:g} s at most.")
        )
    seat.leave(error, hold_s=channel.hold_s)


def _wait_and_say(seat: Membership) -> Callable[[float], None]:
    """Return what sleeps and, now and then, says what for."""
    say_at = time.monotonic() + QUIET_S

    def wait(seconds: float) -> None:
        nonlocal say_at
        time.sleep(seconds)
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + REMIND_S
            seat.emit(Event("note", seat.node, f"waits for node {CONTROL} (the control node) to start"))

    return wait


def _connect(book: AddressBook, channel: MemberChannel, seat: Membership, timeout_s: float) -> str:
    """Look the control node up and connect, for `timeout_s` seconds; each failed try looks it up anew."""
    deadline = time.monotonic() + timeout_s
    refusals = _Refusals(seat)
    wait = _wait_and_say(seat)
    while True:
        address = book.look_up(max(1.0, deadline - time.monotonic()), timeout_s, wait)
        if address.error is not None:
            raise from_wire(address.error)
        if address.closed:  # the control node's step launched nothing and has ended well
            seat.deliver({"type": "welcome"})
            seat.deliver({"type": "bye"})
            return address.addresses[0]
        left_s, try_s = deadline - time.monotonic(), min(_TRY_S, refusals.patience_s(address))
        try:
            return channel.connect(address.addresses, address.port, address.token, max(1.0, min(left_s, try_s)))
        except GangError:
            if left_s <= try_s or channel.turned_away:
                raise
        refusals.note(address, channel.no_listener)


class _Refusals:
    """How long the same published address has refused connections without a break."""

    def __init__(self, seat: Membership) -> None:
        self._seat = seat
        self._address: Address | None = None
        self._since = 0.0

    @staticmethod
    def patience_s(address: Address) -> float:
        """Return how long the address may refuse."""
        return _REFUSED_HERE_S if address.addresses == (LOOPBACK,) else _REFUSED_S

    def note(self, address: Address, refused: bool) -> None:
        """Take the outcome of a try: say so once, and raise when it has lasted too long."""
        if not refused:
            self._address = None
            return
        patience_s = self.patience_s(address)
        where = f"node 0 (the control node) refuses connections at {', '.join(address.addresses)}, port {address.port}"
        is_new, now = address != self._address, time.monotonic()
        if is_new:
            self._address, self._since = address, now - min(_TRY_S, patience_s)
        if now - self._since >= patience_s:
            raise GangError(
                f"Node {self._seat.node} (host {self._seat.host}) gave up: {where}, for {patience_s:g} s. That port was open "
                "once, so its task has ended without a word. Look at its log, and at the events of its pod or job."
            )
        if is_new:
            text = f"{where}: its task may have ended; trying for {patience_s:g} s in all"
            self._seat.emit(Event("note", self._seat.node, text))
