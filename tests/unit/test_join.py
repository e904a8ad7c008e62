"""How nodes find each other, whatever has become of the control node. Real sockets; the datastore is a dict."""

import re
import signal
import socket
from contextlib import suppress
from unittest.mock import Mock

import pytest
from loops import InLoop, Loop
from test_registry import FlowDatastore, registry_of
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    GangError,
    LaunchFailed,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.gang import Presence
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Join, from_wire
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import GangView, NodeView
from metaflow_extensions.torchrun.plugins.torchrun.machine.network import pick_port
from metaflow_extensions.torchrun.plugins.torchrun.registry import AddressRecord
from metaflow_extensions.torchrun.plugins.torchrun.settings import DEFAULTS, parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.control_side import ControlSide
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining
from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore

HOST = "127.0.0.1"


@pytest.fixture
def registry():
    return registry_of(FlowDatastore())


@pytest.fixture
def control():
    """Return a function that makes a control node's channel: its address, and what is delivered there."""
    open_ = {}

    def start():
        token, inbox = "a token", []
        hear = lambda what, message: inbox.append(from_wire(message))  # noqa: E731
        rules = {"started_timeout_s": 60.0, "grace_s": 1.0}
        side = InLoop(Loop(), lambda: ControlSide(hear, Mock(), 2, 20.0, token, rules))
        open_[side] = side
        port = side.listen(None, HOST)
        side.send(Join(node=0, host="host-0"))
        assert eventually(lambda: side.gang.nodes[0].presence is Presence.HERE)
        return AddressRecord((HOST,), port, token), inbox, lambda: open_.pop(side).close(0.0)

    yield start
    for side in open_:
        side.close(0.0)


def settings(**attributes):
    return parse_settings({**DEFAULTS, **attributes}, "train")


def find(registry, own=None):
    """Become a member as a task does."""
    member = joining.begin(1, 2, own or settings())
    try:
        joining.connect(member, registry, own or settings())
    except BaseException as error:
        member.leave(error)
        raise
    return member


def join(registry, **attributes):
    try:
        find(registry, settings(**attributes)).leave()
    except Exception as error:
        return error
    return None


def become_control(registry, **attributes):
    """Become the control node as a task does; return its member and what stores what is known of the gang."""
    own = settings(**attributes)
    member = joining.begin_gang(own, num_nodes=2, token="a token")
    store = GangStore(member, (), Cards(None), registry)
    try:
        joining.open_gang(member, registry, None, own, "a token")
    except BaseException as error:
        member.leave(error)
        store.close(error)
        raise
    return member, store


def test_a_control_node_that_does_not_answer_is_named_with_the_setting(registry):
    registry.save(AddressRecord((HOST,), pick_port(), "secret"))
    error = join(registry, all_nodes_started_timeout=0.1)
    assert type(error) is GangError
    assert re.search(rf"tried {HOST} on port \d+ for 0.1 s; .* its task has ended.*channel_port", str(error))


def begun(registry, **more):
    """Have a former control node's record and view in the datastore."""
    registry.save(AddressRecord((HOST,), pick_port(), "secret", "gpu-0 🙂*"))
    nodes = [NodeView(f"gpu-{node}", state="running") for node in (0, 1)]
    view = GangView(began=1000.0, now_s=2.0, nodes=nodes, outputs={0: {1: {"key": "k", "files": 3}}}, **more)
    view.add("joined", "joined", 0)
    registry.save_view(view)
    return view


def test_a_control_node_does_not_take_the_place_of_another_and_keeps_what_that_has_recorded(registry):
    before = begun(registry)
    with pytest.raises(TorchrunPreempted) as here:
        joining.refuse_second_run(registry, 2)
    assert str(here.value).startswith("The control node's pod (or container) was deleted or replaced: this task ")
    assert "(host gpu-0 🙂*). It does not run the step's code" in str(here.value)
    assert "@retry" in str(here.value)
    stored = registry.load_view()
    assert (stored.events[:-1], stored.outputs) == (before.events, before.outputs), "all that the first has left"
    assert stored.reports[-1].text == str(here.value)
    assert (stored.outcome, [node.state for node in stored.nodes]) == ("failed", ["lost", "stopped"])
    assert "was deleted or replaced" in stored.why

    error = join(registry)
    assert str(error) == str(here.value), "a node that is replaced, too, need not wait for the first control node"
    with pytest.raises(TorchrunPreempted):
        joining.refuse_second_run(registry, 2)


@pytest.mark.parametrize("method", ["save", "load"])
def test_an_order_to_end_is_heard_though_a_stores_client_takes_it_for_an_error(method, registry, control, monkeypatch):
    """botocore does (`httpsession.py`), and tries again."""
    registry.save(control()[0])
    do, came = getattr(registry, method), []

    def interrupted(*args):
        if not came:
            came.append(method)
            with suppress(Exception):
                signal.raise_signal(signal.SIGTERM)
        return do(*args)

    monkeypatch.setattr(registry, method, interrupted)
    with pytest.raises(TorchrunPreempted, match="SIGTERM"):
        (become_control if method == "save" else find)(registry)


def test_a_member_that_comes_after_an_error_raises_it(registry):
    with socket.create_server((HOST, 0)) as taken, pytest.raises(GangError) as here:
        become_control(registry, channel_port=taken.getsockname()[1])
    error = join(registry)
    assert isinstance(error, LaunchFailed)
    assert str(here.value) in str(error)
    assert error.cause["node"] == 0


def test_a_task_that_comes_when_the_gang_is_over_ends_well_at_once(registry, monkeypatch, capfd):
    registry.save(AddressRecord((HOST,), pick_port(), "token"))
    view = GangView(nodes=[NodeView(state="finished") for _ in range(2)], is_over=True)
    registry.save_view(view)
    codes = []

    def leave(code):
        codes.append(code)
        raise InterruptedError

    monkeypatch.setattr(joining.os, "_exit", leave)
    with pytest.raises((InterruptedError, GangError)):
        find(registry)
    assert codes == [0]
    assert "has nothing to do" in capfd.readouterr().err
