"""When Metaflow is asked for the gang's card."""

import os
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from metaflow import current
from metaflow.plugins.cards.card_creator import CardCreator, CardProcessManager
from unit_helpers import eventually

from metaflow_extensions.torchrun.plugins.torchrun.compat import cards
from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchFailed
from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import children
from metaflow_extensions.torchrun.plugins.torchrun.records.snapshot import Snapshot
from metaflow_extensions.torchrun.plugins.torchrun.show import live_card
from metaflow_extensions.torchrun.plugins.torchrun.show.live_card import LiveCard, pause_of_member_s, pause_s


class FakeCard:
    """What `CardComponentManager` (Metaflow 2.19) is to us; `made` has the modes of final cards."""

    def __init__(self):
        self.shown, self.made = [], []
        self.fails = False
        self._latest_user_data = None
        self._card_creator_args = {"card_uuid": "of-a-test"}
        self._card_creator = SimpleNamespace(create=self.create)

    def refresh(self, data):
        self.shown.append(data)
        if self.fails:
            raise OSError("no process")

    def create(self, card_uuid, mode, final):
        assert final
        self.made.append((mode, self._latest_user_data))


@pytest.fixture
def card(monkeypatch):
    card = FakeCard()
    collector = {"torchrun": [card]}
    current._update_env({"card": SimpleNamespace(get=lambda name: collector[name])})
    monkeypatch.setattr(live_card, "_LOOKS_EVERY_S", 0.01)
    for name in ("_SHORTEST_S", "_SHORTEST_QUIET_S"):
        monkeypatch.setattr(live_card, name, 0.05)
    yield card
    current._update_env({"card": None})


def test_the_card_follows_what_happens_and_ends_with_the_last(card, monkeypatch):
    seen = ["joined"]
    live = LiveCard(lambda: Snapshot(features={"seen": list(seen)}), lambda: len(seen))
    eventually(lambda: len(card.shown) == 1)
    assert card.shown[0]["now_s"] >= 0
    card.fails = True
    seen.append("go")
    eventually(lambda: len(card.shown) == 2)
    assert card.shown[1]["seen"] == ["joined", "go"]
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
    assert pause_s(age_s, has_news=False, shortest_s=5) == pytest.approx(pause)
    assert pause_s(age_s, has_news=True, shortest_s=5) == pytest.approx(after_news)


def test_the_first_minute_of_a_step_takes_as_little_as_a_card_that_can_be_watched():
    now_s, renewals, news = 0.0, 0, [1.0, 3.0, 6.0, 9.0]  # joined, ready, first output, first numbers
    shown_s = 0.0
    while now_s < 60:
        pause = pause_s(now_s, has_news=any(shown_s <= at < now_s for at in news), shortest_s=5)
        if renewals == 0 or now_s - shown_s > pause:
            shown_s, renewals = now_s, renewals + 1
        now_s += 1
    assert renewals <= 6, "with one every 5 s it would be 12"


@pytest.mark.parametrize(
    ("slowest_s", "load", "patience_s"),
    [(0, 0, 15), (3, 0.9, 15), (8, 0, 30), (0, 3, 45), (100, 0, 60), (0, 50, 60)],
)
def test_a_failed_task_waits_longer_for_its_last_card_where_cards_take_longer(slowest_s, load, patience_s):
    assert live_card.last_patience_s(slowest_s, load) == patience_s


def test_a_day_of_renewals_costs_less_than_a_hundredth_of_a_core():
    now_s, renewals = 0.0, 0
    while now_s < 86400:
        now_s, renewals = now_s + pause_s(now_s, has_news=False, shortest_s=5), renewals + 1
    assert 0.7 * renewals / 86400 < 0.01  # seconds of CPU that one takes


def test_the_members_of_a_big_gang_together_renew_their_cards_twice_a_second():
    assert [pause_of_member_s(nodes, is_local=False) for nodes in (2, 10, 256)] == [5, 5, 128]
    assert pause_s(86400, has_news=True, shortest_s=128) == 128


def test_members_on_one_machine_leave_its_cores_to_the_workers():
    assert [0.7 * (nodes - 1) / pause_of_member_s(nodes, is_local=True) < 0.07 for nodes in (2, 8, 64)] == [True] * 3


def test_the_card_is_renewed_sooner_after_news(card):
    live = LiveCard(Snapshot, lambda: 1)
    eventually(lambda: card.shown)
    live._began_at -= 3600
    begin = live._shown_at
    assert [live._is_due(begin + seconds) for seconds in (31, 89, 91)] == [False, False, True]
    live._count = lambda: 2
    assert [live._is_due(begin + seconds) for seconds in (29, 31)] == [False, True]
    live.settle()


def test_a_failed_task_makes_its_last_card_once(card):
    live = LiveCard(lambda: Snapshot(error="failed"), lambda: 1)
    live.make_last()
    live.make_last()
    assert [(mode, shown["error"]) for mode, shown in card.made] == [("render", "failed"), ("refresh", "failed")]


def test_a_slow_last_card_does_not_hold_the_task(card):
    free = threading.Event()
    card._card_creator.create = lambda **_: free.wait(10)
    live = LiveCard(Snapshot, lambda: 1)
    live.make_last(0.05)
    free.set()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("torchrun-")])


def test_a_busy_card_is_not_asked(card, monkeypatch):
    asked = []
    process = SimpleNamespace(poll=lambda: asked.append(1))
    monkeypatch.setattr(CardProcessManager, "_get_card_process", lambda uuid: (process, 0.0))
    live = LiveCard(Snapshot, lambda: 1)
    eventually(lambda: len(asked) > 2)
    assert card.shown == []
    process.poll = lambda: 0
    eventually(lambda: card.shown)
    live.settle()


def test_how_long_a_card_takes_is_known_also_of_one_that_is_still_being_made(card, monkeypatch):
    process = SimpleNamespace(poll=lambda: None)
    live = LiveCard(Snapshot, lambda: 1)
    eventually(lambda: card.shown)
    monkeypatch.setattr(CardProcessManager, "_get_card_process", lambda uuid: (process, 0.0))
    live._shown_at -= 20
    eventually(lambda: live._slowest_s > 20)
    process.poll = lambda: 0
    live.settle()
    waited = []
    monkeypatch.setattr(live_card, "last_patience_s", lambda slowest_s, load: waited.append((slowest_s, load)) or 0.05)
    live.make_last(2.0)
    assert waited == []
    other = LiveCard(Snapshot, lambda: 1)
    other._slowest_s = 20.0
    other.make_last()
    assert waited[0][0] == 20.0


def test_a_forked_child_leaves_the_card_alone(card):
    live = LiveCard(Snapshot, lambda: 1)
    live._pid = os.getpid() + 1
    live.settle()
    live.make_last()
    assert (card.made, card._latest_user_data) == ([], None)
    live._pid = os.getpid()
    live.settle()


def test_the_processes_that_make_cards_are_no_children_of_the_task(tmp_path):
    """Its step may wait for all its children. Metaflow looks at them, and drops what comes too soon, as ever."""
    card = SimpleNamespace(_card_creator=CardCreator([], None))
    cards.start_by(card, live_card._start_detached)
    cards.start_by(card, live_card._start_detached)
    end = tmp_path / "the end"
    wait = f"import os, time\nprint(os.getppid())\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"

    def run(script):
        assert card._card_creator._run_command([sys.executable, "-c", script], "of a test", os.environ, wait=False) == (
            b"",
            False,
        )
        return CardProcessManager._get_card_process("of a test")[0]

    process = run(wait)
    assert process.pid not in children(os.getpid())
    assert process.poll() is None
    assert run("not started") is process
    end.touch()
    eventually(lambda: process.poll() == 0)
    with pytest.raises(ChildProcessError):
        os.wait()
    other = run("import time; time.sleep(600)")
    assert other.pid != process.pid
    CardProcessManager._remove_card_process("of a test")
    eventually(lambda: other.poll() == 0)
    words = [sys.executable, "-c", "print('said')"]
    assert card._card_creator._run_command(words, "of a test", os.environ, wait=True) == (b"said\n", False)


def card_started_by(error):
    """Have a card of Metaflow's made where what starts its process fails; return how Metaflow was called."""

    def start(*_):
        raise error

    called = []
    creator = SimpleNamespace(_run_command=lambda *args, **options: called.append(options) or (b"", False))
    cards.start_by(SimpleNamespace(_card_creator=creator), start)
    creator._run_command([], "of a test", {}, wait=False)
    return called


def test_where_its_process_can_not_be_started_metaflow_starts_it():
    assert card_started_by(OSError("no more processes")) == [{"wait": False, "timeout": None}]


def test_the_gangs_news_reaches_a_step_that_asks_for_its_card():
    with pytest.raises(LaunchFailed, match="node 3 is lost"):
        card_started_by(LaunchFailed("node 3 is lost"))


def test_where_nobody_takes_note_of_their_ends_they_are_started_as_metaflow_does(monkeypatch):
    """Else each leaves a dead process behind, as where a flow is a container's first process."""
    card = SimpleNamespace(_card_creator=CardCreator([], None))
    cards.start_by(card, live_card._start_detached)
    run = partial(
        card._card_creator._run_command, [sys.executable, "-c", ""], "of another test", os.environ, wait=False
    )
    run()
    process = CardProcessManager._get_card_process("of another test")[0]
    eventually(lambda: process.poll() == 0)
    monkeypatch.setattr(live_card._CardProcess, "is_reaped", False)
    monkeypatch.setattr(live_card._CardProcess, "is_of_use", True)
    for _ in range(2):  # and so on: not every other one
        run()
        child = CardProcessManager._get_card_process("of another test")[0]
        assert isinstance(child, subprocess.Popen)
        child.wait()


class FakeUsersCard(FakeCard):
    """A card of the user's own, as `CardComponentManager` (Metaflow 2.19) has it; `made` has the modes of all cards."""

    def __init__(self, *components):
        super().__init__()
        self._card_creator_args = {"card_uuid": "of-a-user", "runtime_card": True}
        self.components = Components(enumerate(components))
        self._latest_user_data = {"mine": 1}
        self._last_layout_change, self._last_render, self._render_seq, self._last_refresh = None, 0, 0, 3.0

    def _card_proc(self, mode):
        self.made.append((mode, [each.render() for each in self.components.values()]))

    def create(self, card_uuid, runtime_card, mode, final):
        self.made.append((mode, final))


class Components(dict):
    layout_last_changed_on = 1.0


@pytest.fixture
def with_users_card(card, monkeypatch):
    """Return a function that adds a card of a user's own, with these components."""

    def add(*components):
        found = FakeUsersCard(*components)
        facts = {"card": SimpleNamespace(get=lambda name: [], _card_component_store={"a": found})}
        current._update_env(facts)
        return found

    for name, value in {"flow_name": "Flow", "run_id": "1", "step_name": "train", "task_id": "2"}.items():
        monkeypatch.setattr(current, f"_{name}", value)
    return add


def test_a_users_card_follows_too_and_keeps_what_is_the_users(card, with_users_card):
    current._update_env({"card": SimpleNamespace(get=lambda name: [])})
    seen = ["joined"]
    live = LiveCard(lambda: Snapshot(features={"seen": list(seen)}), lambda: len(seen))
    part = live.part(("outcome",))
    part.render = lambda: (part._place(), part._snapshot())
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
    assert part._snapshot().now_s is None


def test_after_a_new_page_of_a_users_card_its_data_follow_soon(card, with_users_card):
    live = LiveCard(Snapshot, lambda: 7, lambda: True)
    mine = with_users_card(live.part(()))
    live._renew([mine])
    assert live._shown != 7, "the next renewal is due as after news"
    live._renew([mine])
    assert live._shown == 7
    live.settle()


def test_a_users_card_is_left_alone_while_the_steps_own_code_runs(card, with_users_card):
    own_code, asked = True, []

    def runs_own_code():
        asked.append(1)
        return own_code

    live = LiveCard(Snapshot, lambda: len(asked), runs_own_code)
    mine = with_users_card(live.part(()))
    eventually(lambda: len(asked) > 3)
    assert mine.made == []
    own_code = False
    eventually(lambda: mine.made)
    live.settle()


def test_a_users_card_without_a_part_is_no_affair_of_ours(card, with_users_card):
    live = LiveCard(Snapshot, lambda: 1)
    live.part(())
    assert with_users_card(object()).made == []
    assert cards.with_component(live_card.GangPart) == []
    live.make_last()


def test_a_failed_task_makes_the_last_of_a_users_card_as_of_a_task_that_runs(card, with_users_card):
    live = LiveCard(Snapshot, lambda: 1, lambda: True)
    mine = with_users_card(live.part(()))
    live.make_last()
    live.make_last()
    assert mine.made == [("render_runtime", True), ("refresh", True)]


def test_without_a_card_of_ours_nothing_runs():
    current._update_env({"card": SimpleNamespace(get=lambda name: [])})
    live = LiveCard(Snapshot, lambda: 1)
    assert not live._thread.is_alive()
    live.settle()
    live.make_last()
    current._update_env({"card": None})
    assert cards.of_type("torchrun") == []
