"""What features keep on the control node: each gets its own, and one that fails harms nobody."""

import math

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened, Keeper, Keepers, Remarks, Where
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report

SEEN = Happened("seen", 1, "in a record", 3, exit_code=0, seconds=0.5)


class Notebook(Keeper):
    """Keeps all that it gets, has a remark each second, and fails where the test says so."""

    def __init__(self, fails=""):
        self.kept, self.fails = [], fails

    def _note(self, name, *about):
        if name == self.fails:
            raise RuntimeError("torn")
        self.kept.append((name, *about))

    def begin(self, launch, policy, at_s):
        self._note("begin", launch, policy, at_s)

    def handle(self, node, told, at_s):
        self._note("handle", node, told.data, at_s)
        return Remarks(answer=told.data) if "id" in told.data else None

    def request(self, data, at_s):
        return Remarks(ask=data)

    def ended(self, node, ok):
        self._note("ended", node, ok)
        return Remarks() if ok else Remarks(("a node has failed",))

    def tick(self, at_s, where):
        self._note("tick", at_s)
        assert where(3).node == SEEN.node
        return Remarks((f"at {at_s:g} s",), (SEEN,))

    def record(self):
        self._note("record")
        return {"kept": len(self.kept), "none": math.inf}

    def besides(self):
        self._note("besides")
        return {"more": 3}

    def verdict(self, launch, to_control, error):
        self._note("verdict", launch)
        return {"launch": launch, "to_control": to_control, "ok": error is None}

    def detail(self, kind):
        return f"of a {kind}"

    @property
    def heard(self):
        """What the gang has it know, without its own second hand."""
        return [each for each in self.kept if each[0] in ("begin", "handle", "ended")]


def told(feature="first", **data):
    return Report(feature, 0, 0, data)


def where(rank):
    return Where(rank // 2, rank, f"host-{rank // 2}")


def lines(keepers):
    return [line for remarks in keepers.pop_remarks() for line in remarks.lines]


def use(keepers):
    """Call everything; return the lines for the log."""
    keepers.begin(0, {}, 0.0)
    keepers.handle(0, told(), 1.0)
    keepers.ended(0, ok=True)
    keepers.record()
    keepers.verdict(0, True, None)
    keepers.tick(2.0, where)
    return lines(keepers)


@pytest.mark.parametrize("fails", ["begin", "ended", "tick", "verdict"])
def test_a_keeper_that_raises_is_silent_from_then_on_and_a_line_says_so_once(fails):
    well, ill = Notebook(), Notebook(fails)
    keepers = Keepers({"first": ill, "second": well})
    assert sorted(use(keepers)) == ["at 2 s", "warning: nothing more is kept of the nodes' first: RuntimeError: torn"]
    before = list(ill.kept)
    assert use(keepers) == ["at 2 s"]
    assert ill.kept == before
    assert keepers.record() == {"first": None, "second": {"kept": len(well.kept) - 1, "none": None}, "more": 3}


@pytest.mark.parametrize("fails", ["record", "besides"])
def test_a_record_that_can_not_be_read_costs_that_record_alone(fails):
    """Threads of cards ask for it while the gang's thread changes what it is made of."""
    ill = Notebook(fails)
    keepers = Keepers({"first": ill})
    assert use(keepers) == ["warning: the record of first could not be read: RuntimeError: torn", "at 2 s"]
    assert use(keepers) == ["at 2 s"]
    assert keepers.verdict(4, True, None)["first"]["ok"] is True
    ill.fails = ""
    assert keepers.record()["first"] is not None


def test_a_message_that_does_not_fit_silences_its_node_alone():
    ill = Notebook("handle")
    keepers = Keepers({"first": ill})
    keepers.handle(1, told(), 1.0)
    ill.fails = ""
    for node in (1, 2):
        keepers.handle(node, told(), 2.0)
    assert [line.rpartition("kept of ")[2] for line in lines(keepers)] == ["node 1's first: RuntimeError: torn"]
    assert ill.kept == [("handle", 2, {}, 2.0)]
    assert keepers.record()["first"] is not None
