"""A call of `run` in its task: what it does for the launch that its supervisor runs, and how it ends."""

import math
import queue
import threading
from functools import partial

import pytest
from fake_link import FakeLink, member_of
from fake_node import ERROR
from unit_helpers import HANG_S, MemoryStore, eventually, settings_of_run

from metaflow_extensions.torchrun.plugins.torchrun.errors import (
    LaunchFailed,
    TorchrunPreempted,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Store, Stored, Verdict, to_wire
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call as RunCall
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Outcome
from metaflow_extensions.torchrun.plugins.torchrun.task.launch_call import LaunchCall
from metaflow_extensions.torchrun.plugins.torchrun.task.launch_outputs import LaunchOutputs
from metaflow_extensions.torchrun.plugins.torchrun.task.transfer import PATIENCE_S, Step, ToStore, TransferFailed


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


@pytest.mark.parametrize("generation", [0, 1])
def test_each_generation_stores_its_own_outputs(generation, tmp_path, monkeypatch):
    """A failure elsewhere may restart the gang when this node has stored all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_text("weights")
    store = MemoryStore()
    run = settings_of_run(outputs=["*.pt"], outputs_from="all")
    call = Call(outputs=LaunchOutputs.of(run, 1, store))
    for number, error in ((0, None), (generation, ERROR)):
        before = len(store.data)
        call.says("store", to_wire(Store(0, number, error, None if error is None else 60.0)))
        while not isinstance(call.link.messages.get(timeout=HANG_S), Stored):
            pass
        assert (len(store.data) > before) is (number == 1 or error is None), "what is stored is not stored again"
    call.ends_well()


def test_what_interrupts_the_node_is_handed_on_and_comes_back_if_it_was_too_late():
    call = Call()
    call.link.says("must_end", "its machine is taken away")
    assert call.expect("interrupt") == ["its machine is taken away"]
    error = call.ends_well(handled=0)
    assert isinstance(error, TorchrunPreempted), "raised in the step's own code, which runs again"


# --- what the workers have left ---------------------------------------------------------------------


class Files:
    """Stores something of ranks 2 and 3; its datastore waits for the test's words, and the word "fail" is an error."""

    def __init__(self):
        self.words, self.saving, self.keys = queue.Queue(), threading.Semaphore(0), {}

    def to_store(self, call, error, within_s):
        steps = [Step(f"rank {rank}'s value", partial(self.save, rank), PATIENCE_S) for rank in (2, 3)]
        return ToStore(iter(steps), self.keys)

    def save(self, rank):
        self.saving.release()
        if self.words.get(timeout=HANG_S) == "fail":
            raise RuntimeError("SlowDown")
        self.keys.update(key=f"key {rank}", files=rank, size=5)

    def result(self, call, told, say):
        raise TransferFailed("rank 2's value could not be loaded")

    def known(self, told):
        return told


@pytest.fixture
def files():
    files = Files()
    yield files
    for _ in range(4):
        files.words.put("fail")  # whoever was given up


def storing(files, *about):
    """Return a call that stores what the workers have left, and waits for its datastore."""
    call = Call(outputs=files, where="the s3 datastore s3://bucket")
    call.says("store", to_wire(Store(0, *about)))
    return call


def stored_of(call):
    """Return what was told of the service, and *stored*."""
    told = []
    while not isinstance(message := call.link.messages.get(timeout=HANG_S), Stored):
        told += [message.data] if message.kind == "outputs" else []
    return told, message


def test_an_upload_is_given_up_when_all_start_again(files):
    call = storing(files, 0)
    assert files.saving.acquire(timeout=HANG_S)
    call.says("store", None)
    eventually(lambda: not call.member.uploads)
    for _ in range(2):
        files.words.put("go on")
    eventually(lambda: "torchrun-values" not in {thread.name for thread in threading.enumerate()})
    assert files.words.qsize() == 1, "the second value is not begun"
    assert not any(isinstance(message, Stored) for message in call.link.messages.queue)
    call.ends_well()


@pytest.mark.parametrize("word", ["go on", "fail"])
def test_what_is_left_of_a_failed_launch_is_stored_and_its_loss_is_no_failure(word, files):
    call = storing(files, 3, ERROR, 60.0)  # of a generation that was to come
    for _ in range(2):
        files.words.put(word)
    told, stored = stored_of(call)
    assert (stored.generation, stored.failures) == (3, ())
    assert told == ([{"key": "key 3", "files": 3, "size": 5}] if word == "go on" else [])
    of_control = {"0": ["key", 1, 1]}
    found = call.ends_well(ERROR, {"outputs": {"nodes": of_control}}).outputs["nodes"]
    assert found == (of_control | {"1": ["key 3", 3, 5]} if word == "go on" else of_control), "and its own"


def test_what_can_not_be_stored_is_a_failure_of_a_launch_that_had_ended_well(files):
    files.words.put("fail")
    call = storing(files, 0)
    cause = stored_of(call)[1].failures[0].cause
    assert (cause.kind, cause.rank) == ("store", None)
    assert cause.what.startswith(
        "has ended well, but rank 2's value could not be stored in the s3 datastore s3://bucket"
    )
    call.ends_well(ERROR)


def test_a_result_that_can_not_be_loaded_is_a_failure_of_a_launch_that_had_ended_well(files):
    call = Call(outputs=files)
    outcome = call.ends_well(left={"outputs": {"2": "key"}})
    with pytest.raises(LaunchFailed, match="had ended well on all nodes") as caught:
        call.call.result(outcome)
    assert (caught.value.cause["category"], caught.value.outputs) == ("store", {"2": "key"})
