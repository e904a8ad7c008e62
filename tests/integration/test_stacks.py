"""`torchrun stacks` and `torchrun show --follow`, on a gang that computes, and whose rank 3 then waits for data."""

import json
import re
from functools import partial

import pytest
from limits import eventually

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("asked")]


@pytest.fixture(scope="module")
def asked(start_shared_flow):
    flow = start_shared_flow(runs_=[{"entrypoint": "asked_worker.py"}], attrs={"nproc_per_node": 2})
    flow.await_notes("task-0", 1)
    yield flow
    if flow.process.poll() is None:
        (flow.out / "enough").touch()
        flow.wait()


@pytest.fixture(scope="module")
def ask(asked):
    return partial(asked.ask, "stacks")


def test_1_every_rank_of_a_gang_that_computes_is_shown_and_moves(asked, ask):
    eventually(lambda: "asked_worker.py" in ask(), "a worker in its script")
    before = json.loads(ask("--json"))
    assert sorted(rank for node in before["nodes"].values() for rank in node["ranks"]) == ["0", "1", "2", "3"]
    for _ in range(3):
        text = ask()
        assert re.search(r"Launch 0, 4 ranks on 2 nodes:\n", text), text
        assert "has not answered" not in text


def test_2_the_rank_that_holds_all_up_is_named_and_does_not_move(asked, ask):
    eventually((asked.out / "waits").exists, "the wait of rank 3")
    others = re.compile(r"ranks 0, 1, 2: asked_worker.py:\d+ in")
    eventually(lambda: "rank 3: asked_worker.py" in (text := ask()) and others.search(text), "the wait of all")
    text = ask()
    assert re.search(r"rank 3: asked_worker.py:\d+ in load_batch", text), text
    assert re.search(r"ranks [\d, ]*3 are at the same place as", text), text
    assert "load_batch" in ask("--rank", "3")
    assert "Rank 9 has not answered" in ask("--rank", "9", expect=1)


def test_3_the_end_is_followed(asked):
    (asked.out / "enough").touch()
    assert "have ended well" in asked.ask("show", "--follow")
    assert asked.wait() == 0, asked.text


def test_4_a_gang_that_is_over_says_so_at_once(asked, ask):
    assert "has ended, so none of its workers runs" in ask(expect=1)
