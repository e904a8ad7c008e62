"""A call of `run` in its task: what it does for the launch that its supervisor runs, and how it ends."""

import math
import queue
import threading
from contextlib import closing

import pytest
from fake_link import FakeLink, member_of
from fake_node import ERROR
from unit_helpers import HANG_S, MemoryStore, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    LaunchFailed,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Store, Stored, Verdict, to_wire
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call as RunCall
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Outcome
from metaflow_extensions.torchrun.plugins.torchrun.task.function_call import FunctionCall
from metaflow_extensions.torchrun.plugins.torchrun.task.launch_call import LaunchCall


class Call:
    """One call in a thread, as the step's code may make it there."""

    def __init__(self, **more):
        self.link = FakeLink()
        self.member = member_of(self.link)
        made = RunCall("sh", (), False, 1, 2, 1, "python3", grace_s=0.1)
        self.call = LaunchCall(made, self.member, lambda: made, **more)
        self.came = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()
        self.request = self.expect("run")[1]

    def _run(self):
        try:
            self.came.put(self.call.run())
        except BaseException as error:
            self.came.put(error)

    def expect(self, what):
        said, *rest = self.link.sent.get(timeout=HANG_S)
        return rest if said == what else self.expect(what)

    def says(self, *frame):
        self.link.says(*frame)

    def ends(self, number=0, **told):
        self.says("ended", number, {"handled": 0, **told})
        return self.came.get(timeout=HANG_S)

    def ends_well(self, error=None, left=None, **told):
        outcome = Outcome(Verdict(0, error, left=left or {}), "torchrun x", {1: 0}, (), 1.5)
        return self.ends(outcome=to_plain(outcome), **told)


def test_what_is_no_number_comes_back_as_nan():
    call = Call()
    told = {"last": {"loss": None, "step": 7}, "history": {"loss": [[1, 3.0], [7, None]]}}
    found = call.call.result(call.ends_well(left={"progress": told}))
    assert (math.isnan(found.metrics.pop("loss")), found.metrics) == (True, {"step": 7})
    (first, (step, value)) = found.history["loss"]
    assert (first, step, math.isnan(value)) == ((1, 3.0), 7, True)


def test_what_interrupts_the_node_is_handed_on_and_comes_back_if_it_was_too_late():
    call = Call()
    call.link.says("must_end", "its machine is taken away")
    assert call.expect("interrupt") == ["its machine is taken away"]
    error = call.ends_well(handled=0)
    assert isinstance(error, TorchrunPreempted), "raised in the step's own code, which runs again"


# --- what the workers have left ---------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return a datastore for the one file that the workers have left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_text("weights")
    return MemoryStore()


def call_with(store):
    return Call(outputs=("*.pt",), store=store)


def stored_of(call, *about):
    """Have the node store; return what it tells of its outputs, and *stored*."""
    call.says("store", to_wire(Store(0, *about)))
    told = []
    while not isinstance(message := call.link.messages.get(timeout=HANG_S), Stored):
        told += [message.data] if message.kind == "outputs" else []
    return told, message


def test_what_is_stored_again_after_a_failure_elsewhere_is_told_again(store):
    call = call_with(store)
    for about in ((0,), (1, ERROR, 60.0)):
        ((told,), _) = stored_of(call, *about)
        assert (told["files"], told["names"]) == (1, ["model.pt"])
    call.ends_well()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_left_of_a_failed_launch_is_stored_and_its_loss_is_no_failure(fails, store):
    store.fails, call = fails, call_with(store)
    told, stored = stored_of(call, 3, ERROR, 60.0)  # of a generation that was to come
    assert (stored.generation, stored.failures, len(told)) == (3, (), not fails)
    error = call.ends_well(ERROR, {"outputs": {"nodes": {"0": ["key", 1, 1]}}})
    assert (error.message, error.outputs.nodes) == (ERROR.message, [0] if fails else [1]), "its own"


def test_what_can_not_be_stored_is_a_failure_of_a_launch_that_had_ended_well(store):
    store.fails, call = True, call_with(store)
    cause = stored_of(call, 0)[1].failures[0].cause
    assert (cause.kind, cause.rank) == ("store", None)
    assert cause.what.startswith(
        "has ended well, but its outputs (0 of 1 file so far, now 7 bytes of 'model.pt') could"
    )
    assert f"not be stored in {store.where}" in cause.what
    call.ends_well(ERROR)


def test_a_result_that_can_not_be_loaded_is_a_failure_of_a_launch_that_had_ended_well(store):
    with closing(FunctionCall(settings_of_run(entrypoint=print), store)) as function:
        call = Call(function=function)
        outcome = call.ends_well(left={"functions": {"1": "no such key"}})
        with pytest.raises(LaunchFailed, match="value of rank 1 could not be loaded") as caught:
            call.call.result(outcome)
    assert "had ended well on all nodes" in caught.value.message
    assert caught.value.cause["category"] == "store"
