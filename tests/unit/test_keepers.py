"""What features keep on the control node: each gets its own, and one that fails harms nobody."""

import math

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Happened, Keeper, Keepers, Remarks, Where
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Told


class Notebook(Keeper):
    """Keeps all that it is told, and fails where the test says so."""

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

    def ended(self, node, ok):
        self._note("ended", node, ok)

    def tick(self, at_s, where):
        self._note("tick", at_s)
        return Remarks(("a line",), (Happened("seen", where(3).node, "in a record", 3),))

    def record(self):
        self._note("record")
        return {"kept": len(self.kept), "none": math.inf}

    def besides(self):
        self._note("besides")
        return {"more": 3}

    def verdict(self, launch, to_control, error):
        self._note("verdict", launch)
        return {"last": launch, "knows": to_control and error is None}


def told(feature, **data):
    return Told(0, 0, feature, data)


def where(rank):
    return Where(rank // 2, rank, f"host-{rank // 2}")


def test_each_keeper_gets_what_is_told_of_its_feature():
    first, second = Notebook(), Notebook()
    keepers = Keepers({"first": first, "second": second})
    keepers.handle(1, told("first", a=1), 5.0)
    keepers.handle(1, told("third"), 6.0)
    assert first.kept == [("handle", 1, {"a": 1}, 5.0)]
    assert second.kept == []
    assert (keepers.count, keepers.heard) == (1, 1)


class WithoutRecord(Keeper):
    has_record = False


def test_what_is_kept_can_be_stored_and_told():
    keepers = Keepers({"first": Notebook(), "none": WithoutRecord()})
    assert keepers.verdict(4, True, None) == {"first": {"last": 4, "knows": True}}
    assert keepers.record() == {"first": {"kept": 2, "none": None}, "more": 3}


def test_remarks_are_handed_out_once():
    keepers = Keepers({"first": Notebook(), "empty": Keeper()})
    keepers.tick(7.0, where)
    first, empty = keepers.pop_remarks()
    assert first == Remarks(("a line",), (Happened("seen", 1, "in a record", 3),))
    assert empty == Remarks()
    assert keepers.pop_remarks() == []


def use(keepers):
    """Call everything; return what was said."""
    keepers.begin(0, {}, 0.0)
    keepers.handle(0, told("first"), 1.0)
    keepers.ended(0, ok=True)
    keepers.record()
    keepers.verdict(0, True, None)
    keepers.tick(2.0, where)
    return [line for remarks in keepers.pop_remarks() for line in remarks.lines]


@pytest.mark.parametrize("fails", ["begin", "ended", "tick", "verdict"])
def test_a_keeper_that_raises_is_silent_from_then_on_and_a_line_says_so_once(fails):
    well, ill = Notebook(), Notebook(fails)
    keepers = Keepers({"first": ill, "second": well})
    line = "warning: nothing more is kept of the nodes' first: RuntimeError: torn"
    assert sorted(use(keepers)) == ["a line", line]
    before = list(ill.kept)
    assert use(keepers) == ["a line"]
    assert ill.kept == before
    assert keepers.record() == {"first": None, "second": {"kept": len(well.kept) - 1, "none": None}, "more": 3}


@pytest.mark.parametrize("fails", ["record", "besides"])
def test_a_record_that_can_not_be_read_costs_that_record_alone(fails):
    """Threads of cards ask for it while the gang's thread changes what it is made of."""
    ill = Notebook(fails)
    keepers = Keepers({"first": ill})
    assert use(keepers) == ["warning: the record of first could not be read: RuntimeError: torn", "a line"]
    assert use(keepers) == ["a line"]
    assert keepers.verdict(4, True, None)["first"]["knows"] is True
    ill.fails = ""
    assert keepers.record()["first"] is not None


def test_a_message_that_does_not_fit_silences_its_node_alone():
    ill = Notebook("handle")
    keepers = Keepers({"first": ill})
    keepers.handle(1, Told(0, 0, "first", {}), 1.0)
    ill.fails = ""
    keepers.handle(1, Told(0, 0, "first", {}), 2.0)
    keepers.handle(2, Told(0, 0, "first", {}), 3.0)
    (remarks,) = keepers.pop_remarks()
    (line,) = remarks.lines
    assert line.endswith("node 1's first: RuntimeError: torn")
    assert [name for name, *_ in ill.kept] == ["handle"]
    assert keepers.record()["first"] is not None
