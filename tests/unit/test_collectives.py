"""Which rank misses which collective, by recorded answers of torch's flight recorders. Real ones: tests/integration."""

import json
import time

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.collectives import _MAX_RECORDS, compare, reduced
from metaflow_extensions.torchrun.plugins.torchrun.gang.questions import Question
from metaflow_extensions.torchrun.plugins.torchrun.gang.stacks import NodeStacks, conclude, gathered
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import from_plain, to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import Found

WORLD = "0", "default_pg"
WAITS = Found("train.py:41 in step (in all_reduce)", "m", "text", waits=True)
BUSY = Found("data.py:18 in load", "b", "text")


def entry(number, op="all_reduce", size=1024, group=WORLD, ended=True, backend="gloo", **more):
    """Return what a recorder has of one call (``dump_json`` of FlightRecorderDetail.hpp, torch 2.13)."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"] * (size > 0),
        "input_sizes": [[size]] if size else [],
        "is_p2p": False,
        "pg_id": int(group[0]),
        "process_group": list(group),
        "profiling_name": f"{backend}:{op}",
        "record_id": number - 1,
        "retired": ended,
        "state": "completed" if ended and backend == "nccl" else "scheduled",
        **more,
    }


def calls(ended, *waits, group=WORLD, **more):
    """Return the entries of a rank in which `ended` calls have ended, and which waits in others."""
    rest = [entry(ended + 1 + at, group=group, ended=False, **each, **more) for at, each in enumerate(waits)]
    return [*(entry(number, group=group, **more) for number in range(1, ended + 1)), *rest]


def made(*groups):
    """Return what a worker has recorded of its groups, of which each is a name, a description and its ranks."""
    return [{"name": name, "desc": desc, "ranks": list(ranks)} for (name, desc), ranks in groups]


def said(entries, found=None, silent=(), world=None, backend="gloo", groups=None):
    """Return what is said of ranks, given the entries of each."""
    world = world or len(entries)
    groups = groups or dict.fromkeys(entries, made((WORLD, range(world))))
    of_node = reduced({rank: {backend: {"entries": each}} for rank, each in entries.items()}, groups)
    return compare(of_node, dict(silent), dict.fromkeys(range(world), WAITS) | (found or {}))


IN_IT = {}
"""A call that waits, all_reduce of 1 024 floats."""
WAIT = calls(3, IN_IT)
A_BROADCAST = {"op": "broadcast"}


@pytest.mark.parametrize(
    ("entries", "more", "text"),
    [
        (
            {0: WAIT, 1: calls(3), 2: WAIT, 3: WAIT},
            {"found": {1: BUSY}},
            "Rank 1 has not called all_reduce no. 4 of group default_pg (1 024 x float32); it is at data.py:18. "
            "Ranks 0, 2, 3 wait in it, at train.py:41.",
        ),
        (
            {0: WAIT, 1: [], 2: calls(2)},
            {"found": {0: BUSY}},  # it has called it, and computes meanwhile
            "Ranks 1, 2 have not called all_reduce no. 4 of group default_pg (1 024 x float32); they are at "
            "train.py:41. Rank 0 has called it.",
        ),
        (
            {0: WAIT, 1: calls(3, A_BROADCAST), 2: WAIT},
            {},
            "Ranks of group default_pg differ in the collective that they have called as no. 4: rank 1 broadcast "
            "(1 024 x float32), at train.py:41; ranks 0, 2 all_reduce (1 024 x float32), at train.py:41.",
        ),
        (
            {0: WAIT, 1: calls(3, {"size": 7}), 2: WAIT},
            {},
            "Ranks of group default_pg differ in the size that they have called as no. 4: rank 1 all_reduce "
            "(7 x float32), at train.py:41; ranks 0, 2 all_reduce (1 024 x float32), at train.py:41.",
        ),
        (
            {0: WAIT, 1: WAIT},
            {},
            "All 2 ranks have called all_reduce no. 4 of group default_pg (1 024 x float32), and it ends on none of "
            "them, at train.py:41: look at the network or at a GPU.",
        ),
        (
            {rank: calls(0, {"op": "gather", "size": 1 + rank}) for rank in range(2)},  # sizes may differ
            {},
            "All 2 ranks have called gather no. 1 of group default_pg (1 x float32), and it ends on none of them, at "
            "train.py:41: do all name the same src or dst? If so, look at the network or at a GPU.",
        ),
        (
            {0: WAIT, 1: WAIT},
            {"world": 5, "silent": {2: "did not answer; process state T (stopped)", 3: "had ended"}},
            "Rank 2 did not answer; process state T (stopped). Rank 3 had ended. Rank 4 told nothing. "
            "Ranks 0, 1 wait in all_reduce no. 4 of group default_pg (1 024 x float32), at train.py:41.",
        ),
    ],
)
def test_a_sentence_says_who_misses_which_collective(entries, more, text):
    assert said(entries, **more) == [text]


LATER = [entry(number) for number in range(5001, 7001)]


@pytest.mark.parametrize(
    "entries",
    [
        {0: calls(3), 1: calls(4)},  # nobody waits
        {0: WAIT, 1: calls(4)},  # it goes on: one has ended it already
        {0: [entry(4, ended=False, is_p2p=True)], 1: []},  # between two ranks only
        {0: LATER, 1: LATER[:1000]},
        {0: [replace_id | {"retired": False} for replace_id in LATER], 1: LATER},  # one before may be the first
        {0: calls(0, IN_IT, group=("5", "undefined")), 1: []},  # whose ranks are not known
    ],
)
def test_nothing_is_said_where_facts_are_missing(entries):
    assert said(entries) == []


def test_a_recorder_that_has_forgotten_a_group_tells_nothing_of_it():
    pair = "1", "tp"
    groups = dict.fromkeys(range(2), made((WORLD, range(2)), (pair, range(2))))
    assert said({0: calls(2, IN_IT, group=pair), 1: LATER}, groups=groups) == [], "nor is its rank to blame"
    again = {rank: [*groups[0], *groups[0]] for rank in range(2)}
    assert said({0: calls(2, IN_IT, group=pair), 1: []}, groups=again) == [], "its numbers begin anew"


def test_of_nccl_the_first_that_has_not_ended_counts_and_operations_in_one_call_are_one():
    """Recorded in the form of torch's sources (ProcessGroupNCCL.cpp: `collective`, `endCoalescing`), not by a GPU."""
    one_call = [entry(2, "all_gather_single", 8, ended=False, backend="nccl") for _ in range(3)]
    ended = [entry(1, backend="nccl"), *one_call, entry(2, "coalesced", 0, backend="nccl")]
    ahead = [entry(number, ended=False, backend="nccl") for number in range(3, 900)]
    (text,) = said({0: [*ended, *ahead], 1: ended, 2: [*ended, *ahead[:5]]}, {1: BUSY}, backend="nccl")
    assert text.startswith("Rank 1 has not called all_reduce no. 3 of group default_pg (1 024 x float32); it is at")
    assert text.endswith("Ranks 0, 2 wait in it, at train.py:41.")


# --- many ranks -------------------------------------------------------------------------------------


def rows_and_columns(world, width=4):
    """Return for each rank its row ("tp") and its column ("dp"), with names as torch numbers them."""
    for rank in range(world):
        row, column = rank // width, rank % width
        tp = (str(1 + row), "tp"), range(row * width, (row + 1) * width)
        yield rank, tp, ((str(1 + world // width + column), "dp"), range(column, world, width))


def of_many(world, lost):
    """Return the answers of nodes with 8 ranks each. One rank is lost before its row's collective.

    So its row waits there, all columns wait for the ranks of that row, and no rank is in the last one of all.
    """
    dumps, groups = {}, {}
    for rank, tp, dp in rows_and_columns(world):
        is_held = rank in tp[1] and lost in tp[1]
        row = calls(5, *([IN_IT] if is_held and rank != lost else []), group=tp[0])
        column = calls(4, *([] if is_held else [{"size": 77}]), group=dp[0])
        entries = [*calls(9), *row, *([] if is_held else [entry(6, group=tp[0])]), *column]
        dumps[rank] = {"gloo": {"entries": [{**each, "record_id": at} for at, each in enumerate(entries)]}}
        groups[rank] = made((WORLD, range(world)), tp, dp)
    nodes = [range(first, first + 8) for first in range(0, world, 8)]
    return [
        NodeStacks(
            "", {rank: BUSY if rank == lost else WAITS for rank in node}, reduced({r: dumps[r] for r in node}, groups)
        )
        for node in nodes
    ]


@pytest.mark.parametrize("world", [64, 4000])
def test_of_many_groups_that_wait_the_one_is_told_for_which_they_all_wait(world):
    nodes = of_many(world, lost=13)
    assert max(len(json.dumps(to_plain(node))) for node in nodes) < 20_000, "a message of each"
    asked = Question("stacks", (0, 0), range(len(nodes)), 10.0)
    began = time.monotonic()
    for number, node in enumerate(nodes):
        asked.keep(number, from_plain(NodeStacks, to_plain(node), ""))
    assert asked.is_over(0.0, {*range(len(nodes))})
    answer = gathered(asked, len(nodes), ())
    assert time.monotonic() - began < 20, "the control node's"
    assert answer.collectives[0] == (
        "Rank 13 has not called all_reduce no. 6 of group tp of ranks 12, 13, 14, 15 (1 024 x float32); "
        "it is at data.py:18. Ranks 12, 14, 15 wait in it, at train.py:41."
    )
    assert not any(node.calls for node in answer.nodes.values()), "it is stored without them"
    detail, record = conclude(answer, ())
    assert detail.splitlines()[0] == answer.collectives[0]
    assert record["first"] == [], "a fact, no guess besides"


def test_groups_that_wait_for_each_other_are_all_told_but_not_too_many():
    pairs = [((str(at), "undefined"), (at, at + 1)) for at in range(5)]
    groups = {rank: made(*(each for each in pairs if rank in each[1])) for rank in range(6)}
    entries = {rank: calls(0, IN_IT, group=pairs[rank][0]) for rank in range(5)} | {5: calls(0, IN_IT, group=("9", ""))}
    texts = said(entries, groups=groups)
    assert [text.partition(" has")[0] for text in texts] == ["Rank 1", "Rank 2", "Rank 3"]
    assert texts[0].startswith("Rank 1 has not called all_reduce no. 1 of group 0 of ranks 0, 1 (1 024 x float32);")


def test_a_nodes_message_is_bounded_and_what_waits_stays():
    some = [((str(at), "undefined"), range(4000)) for at in range(3000)]
    calls_of_all = [entry(1, group=group, ended=at < 2999, record_id=at) for at, (group, _) in enumerate(some)]
    kept = reduced({0: {"gloo": {"entries": calls_of_all}}}, {0: made(*some)})
    assert (len(kept), kept[0].waits, kept[1].waits) == (_MAX_RECORDS, 1, 0)
