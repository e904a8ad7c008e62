"""When Metaflow is asked for the gang's card."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from fake_cards import FakeCard, FakeUsersCard, offer, offered
from gang_snapshots import a_gang
from limits import limit_s
from metaflow import current
from metaflow.datastore import FlowDataStore
from metaflow.plugins.cards.card_creator import CardCreator, CardProcessManager
from metaflow.plugins.datastores.local_storage import LocalStorage
from unit_helpers import HANG_S, Looping, eventually

from metaflow_extensions.torchrun.plugins.torchrun.compat import cards
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import children
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from metaflow_extensions.torchrun.plugins.torchrun.show import live_card
from metaflow_extensions.torchrun.plugins.torchrun.show.live_card import LastCards, LiveCard, pause_s


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(live_card, "_BUSY_S", 0.01)
    for name in ("_SHORTEST_S", "_SHORTEST_QUIET_S"):
        monkeypatch.setattr(live_card, name, 0.05)
    card = FakeCard()
    with offered(card):
        yield card


def test_the_card_follows_what_happens_and_ends_with_the_last(card):
    seen = ["joined"]
    live = LiveCard(lambda: Snapshot(features={"seen": list(seen)}), lambda: len(seen), Looping)
    eventually(lambda: card.shown)  # and again after a pause, news or not
    assert card.shown[0]["now_s"] >= 0
    card.fails = True
    seen.append("go")
    eventually(lambda: card.shown[-1]["seen"] == ["joined", "go"])
    seen.append("done")
    live.settle()
    live.settle()
    assert card._latest_user_data == {**Snapshot().stored(), "seen": ["joined", "go", "done"]}
    assert card.made == []  # Metaflow does it for a task that ends well


@pytest.mark.parametrize(
    ("age_s", "pause", "after_news"),
    [(0, 15, 5), (50, 15, 5), (200, 20, 5), (600, 60, 6), (900, 90, 9), (3600, 90, 30), (86400, 90, 30)],
)
def test_the_older_the_step_the_longer_the_pause_between_renewals(age_s, pause, after_news):
    assert pause_s(age_s, has_news=False) == pytest.approx(pause)
    assert pause_s(age_s, has_news=True) == pytest.approx(after_news)


def test_the_card_is_renewed_sooner_after_news(card, monkeypatch):
    asked, news = [], [1]
    monkeypatch.setattr(live_card, "pause_s", lambda age_s, has_news: asked.append(has_news) or 0.05)
    live = LiveCard(Snapshot, lambda: len(news), Looping)
    eventually(lambda: card.shown and asked[-1] is False)
    news.append(2)
    eventually(lambda: asked.count(True) > 1)
    live.settle()


def test_a_failed_task_makes_its_last_card_once(card):
    live = LiveCard(lambda: Snapshot(error="failed"), lambda: 1, Looping)
    live.make_last()
    live.make_last()
    assert [(mode, shown["error"]) for mode, shown in card.made] == [("render", "failed"), ("refresh", "failed")]


def test_a_slow_last_card_does_not_hold_the_task(card):
    free = threading.Event()
    card._card_creator.create = lambda **_: free.wait(limit_s(HANG_S))
    live = LiveCard(Snapshot, lambda: 1, Looping)
    live.make_last(0.05)
    assert "torchrun-lastcard" in {thread.name for thread in threading.enumerate()}, "it is still being made"
    free.set()
    eventually(lambda: "torchrun-lastcard" not in {thread.name for thread in threading.enumerate()})


def test_a_busy_card_is_not_asked(card, monkeypatch):
    asked = []
    process = SimpleNamespace(poll=lambda: asked.append(1))
    monkeypatch.setattr(CardProcessManager, "_get_card_process", lambda uuid: (process, 0.0))
    live = LiveCard(Snapshot, lambda: 1, Looping)
    eventually(lambda: len(asked) > 2)
    assert card.shown == []
    process.poll = lambda: 0
    eventually(lambda: card.shown)
    live.settle()


def test_a_forked_child_and_a_card_that_was_given_up_make_none(card, monkeypatch):
    live = LiveCard(Snapshot, lambda: 1, Looping)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        live.settle()
        live.make_last()
    assert (card.made, card._latest_user_data) == ([], None)
    assert live.give_up()
    live.make_last()
    assert (card.made, card._latest_user_data) == ([], None)


def creator():
    """Return a card's creator whose processes are started by us."""
    card = SimpleNamespace(_card_creator=CardCreator([], None))
    cards.start_by(card, live_card._start_detached)
    cards.start_by(card, live_card._start_detached)
    return card._card_creator


def make(creator, script, card_uuid):
    """Have a card's process started that runs a script, and return what Metaflow has of it."""
    words = [sys.executable, "-c", script]
    assert creator._run_command(words, card_uuid, os.environ, wait=False) == (b"", False)
    return CardProcessManager._get_card_process(card_uuid)[0]


def test_the_processes_that_make_cards_are_no_children_of_the_task(tmp_path):
    """Its step may wait for all its children. Metaflow looks at them, and drops what comes too soon, as ever."""
    ours, end = creator(), tmp_path / "the end"
    wait = f"import os, time\nprint(os.getppid())\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    process = make(ours, wait, "of a test")
    assert process.pid not in children(os.getpid())
    assert process.poll() is None
    assert make(ours, "not started", "of a test") is process
    end.touch()
    eventually(lambda: process.poll() == 0)
    with pytest.raises(ChildProcessError):
        os.wait()
    other = make(ours, "import time; time.sleep(600)", "of a test")
    assert other.pid != process.pid
    CardProcessManager._remove_card_process("of a test")
    eventually(lambda: other.poll() == 0)
    words = [sys.executable, "-c", "print('said')"]
    assert ours._run_command(words, "of a test", os.environ, wait=True) == (b"said\n", False)


@pytest.fixture
def last(tmp_path, monkeypatch):
    """Return a function that makes a last card as Metaflow asks for it: whether it did, and the files there are then."""
    monkeypatch.setattr(LocalStorage, "datastore_root", str(tmp_path / "flows"))
    (tmp_path / ".metaflow").mkdir()
    monkeypatch.chdir(tmp_path)
    datastore = FlowDataStore("Flow", storage_impl=LocalStorage, ds_root=str(tmp_path / "flows"))

    def make_last(mode, *more, user=None, kind="torchrun"):
        data = tmp_path / f"{mode}.json"
        data.write_text(json.dumps({"user": user or a_gang().stored(), "render_seq": "final"}))
        command = ["python", "flow.py", "card", "create", "1/train/2", "--card-uuid", "ofalast", "--mode", mode]
        command += ["--type", kind, "--data-file", str(data), *more]
        is_made = LastCards(datastore, said.append).make(command, "ofalast")
        assert data.exists() is not is_made
        found = {path.name: path.read_text() for path in tmp_path.rglob("mf.cards/**/*ofalast*")}
        return is_made, found

    said = make_last.said = []
    return make_last


def test_the_last_card_is_made_in_the_task_where_metaflow_would_start_two_processes(last):
    assert last("render")[0]
    is_made, found = last("refresh")
    assert is_made
    page, data = found["torchrun-ofalast.html"], json.loads(found["torchrun-ofalast.data.json"])
    assert 'METAFLOW_RELOAD_TOKEN = "final"' in page
    assert data["reload_token"] == "final"
    assert "gang-ranks" in data["data"]


def test_metaflow_makes_a_last_card_that_it_has_to_register_or_that_is_not_ours_and_a_busy_machine_is_told_of(
    last, monkeypatch
):
    for load, said in ((0.0, 0), (1000.0, 3)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        assert last("render", "--save-metadata", "{}") == (False, {})
        assert last("render", kind="default") == (False, {})
        assert last("refresh", user={"events": 7})[0] is False
        assert len(last.said) == said


@pytest.mark.parametrize("is_first", [True, False])
def test_a_renewal_that_runs_is_ended_for_the_last_card_unless_it_registers_the_card(last, is_first, tmp_path):
    left = tmp_path / "left"
    left.touch()
    words = [sys.executable, "-c", "import time; time.sleep(0.5)" if is_first else "import time; time.sleep(600)"]
    words += ["--save-metadata"] if is_first else ["--data-file", str(left)]
    assert creator()._run_command(words, "ofalast", os.environ, wait=False) == (b"", False)
    assert last("render")[0]
    assert CardProcessManager._get_card_process("ofalast")[0].poll() == 0
    assert left.exists() is is_first


def test_where_nobody_takes_note_of_their_ends_they_are_started_as_metaflow_does(monkeypatch):
    """Else each leaves a dead process behind, as where a flow is a container's first process."""
    ours = creator()
    process = make(ours, "", "of another test")
    eventually(lambda: process.poll() == 0)
    monkeypatch.setattr(live_card._CardProcess, "is_reaped", False)
    monkeypatch.setattr(live_card._CardProcess, "is_of_use", True)
    for _ in range(2):  # and so on: not every other one
        child = make(ours, "", "of another test")
        assert isinstance(child, subprocess.Popen)
        child.wait()


def card_started_by(error):
    """Have a card of Metaflow's made where what starts its process fails; return how Metaflow was called."""

    def start(*_):
        tried.append(1)
        raise error

    tried, called = [], []
    creator = SimpleNamespace(_run_command=lambda *args, **options: called.append(options) or (b"", False))
    for _ in range(2):
        cards.start_by(SimpleNamespace(_card_creator=creator), start)
    creator._run_command([], "of a test", {}, wait=False)
    assert len(tried) == 1
    return called


def test_where_its_process_can_not_be_started_metaflow_starts_it_but_the_gangs_news_reaches_the_step():
    assert card_started_by(OSError("no more processes")) == [{"wait": False, "timeout": None}]
    with pytest.raises(LaunchFailed, match="node 3 is lost"):
        card_started_by(LaunchFailed("node 3 is lost"))


@pytest.fixture
def with_users_card(card, monkeypatch):
    """Return a function that adds a card of a user's own, with these components; there is none of ours."""

    def add(*components):
        found = FakeUsersCard(*components)
        offer(of_users=[found])
        return found

    offer()
    for name, value in {"flow_name": "Flow", "run_id": "1", "step_name": "train", "task_id": "2"}.items():
        monkeypatch.setattr(current, f"_{name}", value)
    return add


def test_a_users_card_follows_too_and_keeps_what_is_the_users(with_users_card):
    seen = ["joined"]
    live = LiveCard(lambda: Snapshot(features={"seen": list(seen)}), lambda: len(seen), Looping)
    part = live.part(("outcome",))
    part.render = lambda: (part._place(), part._shown())
    mine = with_users_card(part)
    eventually(lambda: len(mine.made) > 1)
    assert [mode for mode, _ in mine.made[:2]] == ["render_runtime", "refresh"]
    place, shown = mine.made[1][1][0]
    assert (place.flow, place.control_task, shown.now_s >= 0) == ("Flow", "2", True)
    seen.append("go")
    eventually(lambda: mine.made[-1][1][0][1].features["seen"] == seen)
    assert (mine._latest_user_data, mine._last_refresh) == ({"mine": 1}, 3.0)
    mine.components.layout_last_changed_on = 2.0
    eventually(lambda: [mode for mode, _ in mine.made].count("render_runtime") == 2)
    assert mine._render_seq == 2
    live.settle()
    assert part._shown().now_s is None


def test_after_a_new_page_of_a_users_card_its_data_follow_soon(with_users_card, monkeypatch):
    monkeypatch.setattr(live_card, "_SHORTEST_QUIET_S", 1000.0)
    live = LiveCard(Snapshot, lambda: 7, Looping)
    mine = with_users_card()
    mine.components[0] = live.part(())  # the thread begins to look; the user's card is there by then
    eventually(lambda: [mode for mode, _ in mine.made] == ["render_runtime", "refresh"])
    live.settle()


def test_a_users_card_is_left_alone_while_the_steps_own_code_runs(with_users_card):
    own_code, asked = True, []

    def runs_own_code():
        asked.append(1)
        return own_code

    live = LiveCard(Snapshot, lambda: len(asked), Looping, runs_own_code)
    mine = with_users_card(live.part(()))
    eventually(lambda: len(asked) > 3)
    assert mine.made == []
    own_code = False
    eventually(lambda: mine.made)
    live.settle()


def test_a_failed_task_makes_the_last_of_a_users_card_as_of_a_task_that_runs(with_users_card):
    live = LiveCard(Snapshot, lambda: 1, Looping, lambda: True)
    mine = with_users_card(live.part(()))
    other = LiveCard(Snapshot, lambda: 1, Looping)
    live.make_last()
    live.make_last()
    other.make_last()  # without a part of its own
    assert mine.made == [("render_runtime", True), ("refresh", True)]


def test_a_users_card_without_a_part_is_no_affair_of_ours(with_users_card):
    live = LiveCard(Snapshot, lambda: 1, Looping)
    live.part(())
    mine = with_users_card(object())
    live.make_last()
    assert (mine.made, cards.with_component(live_card.GangPart)) == ([], [])


def test_without_a_card_of_ours_nothing_runs(with_users_card):
    live = LiveCard(Snapshot, lambda: 1, Looping)
    assert "torchrun-card" not in {thread.name for thread in threading.enumerate()}
    live.settle()
    live.make_last()
    current._update_env({"card": None})
    assert cards.of_type("torchrun") == []
