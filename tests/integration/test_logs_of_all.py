"""One log has the lines of all nodes: complete in moderation, counted where not."""

from __future__ import annotations

import re

import pytest
from gangs import Gang

_LINE = re.compile(r"^\[rank (\d+)\] writer (\d+) (\d+) x+$", re.MULTILINE)
_GAP = re.compile(
    r"^\[torchrun node (\d+)\] (\d+) lines? (?:is|are) left out here, .*torchrun logs` has them", re.MULTILINE
)

pytestmark = pytest.mark.slow


def numbers(log: str, rank: int) -> list[int]:
    """Return the numbers of a rank's lines in a log."""
    found = _LINE.findall(log)
    assert all(label == own for label, own, _ in found)
    return [int(number) for label, _, number in found if int(label) == rank]


def await_end(gang: Gang) -> None:
    gang.await_that(lambda: all(process.poll() is not None for process in gang.processes.values()), "the end")


def test_moderate_lines_of_all_nodes_are_complete(gang):
    gang.start(3, nproc=2, do="150 100", entrypoint="writer.py", settings={"logs": "all"}, stand_in=True)
    await_end(gang)
    for rank in range(6):
        assert numbers(gang.log(0), rank) == list(range(150)), gang.told
    for node in (1, 2):
        assert sorted({int(label) for label, *_ in _LINE.findall(gang.log(node))}) == [2 * node, 2 * node + 1]
    assert "left out" not in gang.log(0)
    end = gang.log(0).index("launch 0 has ended well: ranks 0-5")
    assert end > max(match.end() for match in _LINE.finditer(gang.log(0)))
    assert [gang.log(node).count("launch 0 ") for node in range(3)] == [2, 0, 0]


def test_a_flood_is_cut_and_counted_and_whole_in_its_nodes_own_log(gang):
    """20 MB of each of three nodes."""
    count = 200_000
    gang.start(3, do=str(count), entrypoint="writer.py", settings={"logs": "all"}, stand_in=True)
    await_end(gang)
    log = gang.log(0)
    assert numbers(log, 0) == list(range(count))
    for node in (1, 2):
        assert numbers(gang.log(node), node) == list(range(count))
        shown = numbers(log, node)
        missing = sum(int(number) for label, number in _GAP.findall(log) if int(label) == node)
        assert len(shown) + missing == count
        assert missing > count / 2
        assert shown == sorted(set(shown))
        assert shown[-1] == count - 1
    for node in range(3):
        assert gang.launch(node)["seconds"] < 60


def test_the_last_lines_of_a_node_that_fails_stand_before_the_end(gang):
    """Its last 60 KB come at once."""
    gang.start(3, do="600 0 1", entrypoint="writer.py", settings={"logs": "all"}, stand_in=True)
    await_end(gang)
    log = gang.log(0)
    assert numbers(log, 1) == list(range(600)), gang.told
    end = log.index("[torchrun node 0] launch 0 has failed")
    assert log.index("[rank 1] told to fail\n") < end
    assert max(match.end() for match in _LINE.finditer(log)) < end
    assert "left out" not in log
