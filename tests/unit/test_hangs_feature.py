"""Launches that hang: what the control node decides, and what a node tells it."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from fake_node import ERROR, FakeNode

from metaflow_extensions.torchrun.plugins.torchrun.features.hangs import on_page, watch
from metaflow_extensions.torchrun.plugins.torchrun.features.hangs.keep import HangKeeper
from metaflow_extensions.torchrun.plugins.torchrun.features.hangs.told import Diagnostics, groups
from metaflow_extensions.torchrun.plugins.torchrun.features.hangs.watch import HangWatcher
from metaflow_extensions.torchrun.plugins.torchrun.features.progress import watch as progress
from metaflow_extensions.torchrun.plugins.torchrun.gang.keepers import Failing, Remarks
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Report
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy
from metaflow_extensions.torchrun.plugins.torchrun.gang.wire import to_plain
from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import Found, without_stack


def keeper(**policy):
    found = HangKeeper()
    found.begin(0, policy, 100.0)
    return found


def told(data):
    return Report("hangs", 0, 0, data)


# --- on the control node ----------------------------------------------------------------------------


def test_silence_of_all_ranks_is_a_hang():
    kept = keeper(timeout_s=30.0)
    kept.begin(0, {"timeout_s": 30.0}, 119.0)
    kept.handle(1, told({"age_s": 1.0}), 120.0)
    kept.handle(0, told({"age_s": 9.0}), 121.0)  # older than what node 1 has told
    for at_s in range(120, 150):
        assert kept.tick(float(at_s), None) == Remarks()
    text = "no rank wrote anything, reported a step, joined a process group or exited for 30 s"
    failing = Failing("hang", text, advice="If they were only slow, raise hang_timeout_s.")
    assert kept.tick(149.1, None) == Remarks(failing=failing)
    kept.begin(0, {}, 200.0)
    assert kept.tick(999.0, None) == Remarks(), "nobody asks for it"


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(30.0, 600.0), (1000.0, 1000.0)])
def test_the_time_before_the_first_sign_of_life_has_a_limit_of_its_own(timeout_s, limit_s):
    kept = keeper(timeout_s=timeout_s)
    kept.handle(0, told({"age_s": 1.0}), 101.0)
    kept.begin(0, {"timeout_s": timeout_s}, 150.0)  # workers start again, and import again
    for at_s in range(150, 151 + int(limit_s)):
        assert kept.tick(float(at_s), None) == Remarks()
    failing = kept.tick(150.5 + limit_s, None).failing
    assert failing.text.endswith(f"exited for {limit_s:g} s after the start")
    assert failing.advice == f"If they start so slowly, set hang_timeout_s above {limit_s:g}."


def test_time_in_which_the_control_node_itself_was_stopped_is_no_silence():
    kept = keeper(timeout_s=30.0)
    kept.begin(0, {"timeout_s": 30.0}, 100.0)
    kept.handle(0, told({"age_s": 0.0}), 100.5)
    assert kept.tick(101.0, None) == kept.tick(900.0, None) == kept.tick(902.0, None) == Remarks()


def at(line, function="step", waits=False, text="the whole stack"):
    place = f"train.py:{line} in {function}"
    source = f"{function}()"
    return Found(place, f"mark{line}", text, source, f"{place}: {source}", waits)


def hung(*nodes, launch=0):
    """Return a keeper that has heard of nodes, each with its ranks."""
    kept = HangKeeper.of(len(nodes))
    kept.begin(launch, {"timeout_s": 30.0}, 100.0)
    for node, ranks in reversed([*enumerate(nodes)]):
        found = Diagnostics(f"host-{node}", "/tmp/stacks" if ranks and not node else None, ranks)
        kept.handle(node, told(to_plain(found)), 101.0)
    return kept


WAITS = at(41, "main", waits=True)
SAME = replace(WAITS, text="", line="", short="")  # as the second of its node is sent


def test_where_the_ranks_were_is_told_and_whom_to_look_at_first():
    kept = hung({0: WAITS, 1: SAME}, {2: WAITS, 3: at(33, "load")})
    assert kept.detail("hang").splitlines() == [
        "3 ranks in main at train.py:41, rank 3 in load at train.py:33. Look at rank 3 first: the others seem to wait.",
        "Ranks 0, 1, 2: train.py:41 in main: main()",
        "Rank 3: train.py:33 in load: load()",
        "Whole stacks of node 0 (host host-0): /tmp/stacks",
    ]
    assert (kept.detail("timeout"), kept.find_out_s("timeout"), kept.find_out_s("hang")) == ("", 0.0, 15.0)
    kept.begin(1, {}, 200.0)
    assert kept.detail("hang") == ""


@pytest.mark.parametrize(("answered", "said"), [(1, "Nodes 1, 2 have"), (2, "Node 2 has"), (3, None)])
def test_a_node_that_has_not_answered_is_where_to_look(answered, said):
    kept = HangKeeper.of(5)
    kept.begin(0, {"timeout_s": 3.0}, 100.0)
    kept.handle(0, told({"age_s": 0.0}), 100.5)
    kept.ended(3, ok=True)
    kept.gone(4)
    assert [kept.tick(at_s, None).failing is not None for at_s in (101.0, 102.0, 103.0, 104.0)] == [False] * 3 + [True]
    for node in range(answered):
        kept.handle(node, told(to_plain(Diagnostics("host", None, {node: WAITS if node else at(7)}))), 105.0)
    kept.ended(2, ok=False)  # it was stopped, perhaps without a word
    first = kept.detail("hang").splitlines()[0]
    assert first.endswith(
        f" {said} not answered: look there first." if said else " Look at rank 0 first: the others seem to wait."
    )
    assert kept.record()["first"] == ([] if said else [0])


@pytest.mark.parametrize("ranks", [{}, {0: without_stack("it is stopped")}], ids=["no worker", "no stack"])
def test_a_node_that_has_not_answered_is_named_though_nothing_is_known_of_the_others(ranks):
    kept = HangKeeper.of(2)
    kept.begin(0, {"timeout_s": 3.0}, 100.0)
    kept.handle(0, told(to_plain(Diagnostics("host", None, ranks))), 105.0)
    assert "Node 1 has not answered: look there first." in kept.detail("hang")
    assert kept.record()["first"] == []


def test_the_ranks_that_had_ended_on_another_node_are_named():
    kept = HangKeeper.of(3)
    kept.begin(0, {"timeout_s": 3.0}, 100.0)
    kept.ended(2, ok=True)  # a spare, as *go* has it
    kept.handle(0, told({"age_s": 0.0}), 100.5)
    kept.ended(1, ok=True)
    for at_s in (102.0, 104.0):
        kept.tick(at_s, None)
    kept.ended(0, ok=True)  # what ends now is a consequence
    kept.handle(0, told(to_plain(Diagnostics("host", None, {0: WAITS, 1: SAME}))), 105.0)
    first = kept.detail("hang").splitlines()[0]
    assert first.endswith("The ranks of node 1 had ended well: do all ranks make the same number of steps?")
    kept.begin(0, {"timeout_s": 3.0}, 110.0)
    kept.handle(0, told(to_plain(Diagnostics("host", None, {0: WAITS, 1: SAME}))), 115.0)
    assert "ended well" not in kept.detail("hang")


def test_a_place_in_a_file_with_spaces_is_told_as_any_other():
    found = Found("my train.py:3 in main (in barrier)", "m", "")
    assert hung({0: found}).detail("hang").splitlines()[0] == "rank 0 in barrier at my train.py:3."


def test_the_record_has_each_stack_once_and_the_page_shows_it():
    assert HangKeeper().record() is None
    kept = hung({0: WAITS, 1: SAME}, {2: WAITS, 3: at(33, "load")}, launch=1)
    kept.begin(2, {}, 200.0)
    record = json.loads(json.dumps(kept.record()))
    assert [(each["ranks"], each["text"]) for each in record["stacks"]] == [
        ([0, 1, 2], "the whole stack"),
        ([3], "the whole stack"),
    ]
    sentence, *blocks = on_page.PART.parts(record, None)
    assert "launch 1" in sentence.text
    assert [(block.title, block.parts[0].text) for block in blocks] == [
        ("Ranks 0, 1, 2: train.py:41 in main", "train.py:41 in main: main()"),
        ("Rank 3: train.py:33 in load", "train.py:33 in load: load()"),
    ]
    ends = [SimpleNamespace(outcome=outcome, launch=launch) for outcome, launch in OUTCOMES]
    assert [list(on_page.PART.marks(record, each)) for each in ends] == [[], [], []], "it was started again"
    record = hung({0: WAITS, 1: SAME}, {2: WAITS, 3: at(33, "load")}, launch=1).record()
    assert [list(on_page.PART.marks(record, each)) for each in ends] == [[3], [], []]
    assert (on_page.PART.parts(None, None), on_page.PART.marks(None, ends[0])) == ((), {})


OUTCOMES = [("failed", 1), ("failed", 2), ("done", 1)]


def test_the_record_of_many_long_stacks_is_bounded():
    kept = hung({rank: at(rank, text="x" * 50_000) for rank in range(100)})
    assert len(json.dumps(kept.record())) < 150_000


def test_a_hang_without_any_worker_says_so():
    kept = hung({}, {})
    no_workers = "No worker was running on any node that has answered; torchrun was starting them"
    assert kept.detail("hang").startswith(no_workers)
    assert "\n" not in kept.detail("hang")


def test_where_thousands_of_ranks_hang_is_told_by_place():
    kept = hung(*({node * 2 + local: at(9 if node == 17 else 12) for local in range(2)} for node in range(300)))
    detail = kept.detail("hang")
    assert detail.startswith(
        "598 ranks in step at train.py:12, 2 ranks in step at train.py:9. "
        "Look at ranks 34, 35 first: most ranks are at another place.\n"
        "Ranks 0-33, 36-599: train.py:12 in step: step()\nRanks 34, 35: train.py:9 in step: step()"
    )


# --- on a node --------------------------------------------------------------------------------------


def node_with(tmp_path, timeout_s, more=MappingProxyType({})):
    policy = LaunchPolicy(features={"hangs": {"timeout_s": timeout_s}})
    return FakeNode(tmp_path, policy=policy, watches={"hangs": watch.PART, **more})


def test_a_rank_that_has_ended_is_told_for_the_others_may_wait_for_it(tmp_path):
    node = node_with(tmp_path, 5.0)
    agent = node.running()
    node.worker_ended(agent, 0, 0)
    node.stop(kind="hang")
    assert sorted(node.expect(Report).data["ranks"]) == ["0", "1"]
    node.ends(agent)


def test_ranks_without_a_stack_are_alike_only_for_the_same_reason():
    ranks = dict(enumerate(map(without_stack, ("it is stopped", "it has ended", "it is stopped"))))
    assert [each.ranks for each in groups(ranks)] == [(0, 2), (1,)]


def test_the_gang_hears_of_output_and_of_ends_now_and_then(tmp_path):
    node = node_with(tmp_path, 1000.0)
    agent = node.running()
    now = time.monotonic()
    node.worker_ended(agent, 0, 0, at=now)
    assert node.expect(Report).data["age_s"] == pytest.approx(0.0, abs=50)
    node.worker_ended(agent, 1, 0, at=now + 99.0)
    node.worker_ended(agent, 1, 0, at=now + 101.0)
    assert node.expect(Report).data["age_s"] == pytest.approx(-101.0, abs=50), "a tenth of the limit later"
    node.ends(agent)


def test_a_launch_without_the_limit_has_nothing_of_it(tmp_path):
    node = FakeNode(tmp_path, watches={"hangs": watch.PART})
    agent = node.running()
    assert "TORCHRUN_HOOKS" not in agent.env
    node.worker_ended(agent, 0, 0, at=time.monotonic())
    node.stop(kind="timeout")
    node.ends(agent)


class Life:
    """What a node knows of its workers: one that has written nothing."""

    def __init__(self, monkeypatch, port):
        self.now, self.at, self.port, self.is_held_up = 1000.0, None, port, False
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def watcher(self):
        here = SimpleNamespace(
            is_held_up=lambda: self.is_held_up,
            active_at=lambda: self.at,
            running=lambda: {0: os.getpid()},
            port=self.port,
        )
        return HangWatcher(here, 30.0)


def test_a_worker_that_joins_a_process_group_shows_a_sign_of_life(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        life = Life(monkeypatch, port)
        watcher = life.watcher()
        assert watcher.poll() is None
        life.now += 2.0
        assert watcher.poll() is None, "a store that only listens tells nothing of a worker"
        with socket.create_connection(("127.0.0.1", port)):
            assert watcher.poll() is None, "it has just looked"
            life.now += 2.0
            assert watcher.poll() == {"age_s": 0.0}
            life.now += 100.0
            assert watcher.poll() is None, "only once: a connection that stays is no news"
            life.at = life.now
            assert watcher.poll() == {"age_s": 0.0}


def test_a_wait_for_the_reader_is_told_now_and_then_and_its_end_at_once(monkeypatch):
    life = Life(monkeypatch, 1)
    watcher, told = life.watcher(), []
    for second in range(130):  # as one of many nodes on a slow terminal
        life.now += 1.0
        life.is_held_up = second % 10 < 5
        told += [(second, each["waits"]) for each in [watcher.poll()] if each is not None]
    assert told == [(0, True), (5, False), (70, True), (75, False)]


def test_a_step_that_a_worker_tells_is_a_sign_of_life(tmp_path):
    node = node_with(tmp_path, 1000.0, more={"progress": progress.PART})
    agent = node.running()
    metrics = Path(agent.env["TORCHRUN_METRICS_FOLDER"]) / "0.jsonl"
    metrics.write_text('{"step": 1}\n')
    news = [node.next_message() for _ in range(3)]
    (found,) = [each for each in news if isinstance(each, Report) and each.kind == "hangs"]
    assert list(found.data) == ["age_s"]
    node.verdict(ERROR)
