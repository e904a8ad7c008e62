"""The cards that a task makes of its gang, in Metaflow's store of cards."""

import json

import pytest
from fake_cards import cards_of_task
from gang_views import Story, crash
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards, make_none


def a_gang():
    return Story().running().view


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a function that gives this task cards: what Metaflow has of them, and what makes ours."""
    tasks = []

    def made(*kinds, datastore=True):
        tasks.append(cards_of_task(monkeypatch, tmp_path, *kinds))
        cards = Cards(tasks[0].datastore if datastore else None)
        cards.shown = a_gang
        return tasks[0], cards

    yield made
    given = {file for each in tasks[0].commands for file in (each.get("--data-file"), each.get("--component-file"))}
    eventually(lambda: {str(each) for each in (tmp_path / "inputs").iterdir()} <= given, "the end of our input files")


def tokens(found, name="torchrun"):
    """Return those of a page and of its data: a browser loads the page again where they differ."""
    page, data = found[f"{name}.html"], json.loads(found[f"{name}.json"])
    return page.split('METAFLOW_RELOAD_TOKEN = "')[1].split('"')[0], data["reload_token"]


def test_a_card_is_made_while_its_step_runs_and_for_the_last_time_when_that_fails(made):
    task, cards = made("torchrun", "torchrun create")
    cards.renew()
    first = task.stored()
    assert [tokens(first, name) for name in ("torchrun", "torchrun-create")] == [("runtime", "runtime")] * 2
    cards.shown = lambda: Story().running().crashed(crash(text="of rank 3")).view
    cards.renew()
    assert task.stored()["torchrun.html"] == first["torchrun.html"], "a browser renews it with the data"
    assert "of rank 3" in task.stored()["torchrun.json"]
    cards.make_last(HANG_S)
    assert tokens(task.stored()) == ("final", "final")
    cards.renew()  # the step of a `TorchrunSingleNodeMultiGPU` has caught the error, and launches again
    assert tokens(task.stored()) == ("runtime", "runtime")
    assert task.commands == []
    uuids = [card._card_creator_args["card_uuid"] for card in task.cards]
    assert task.metadata.registered == [("1/train/2", uuid, ["attempt_id:3"]) for uuid in uuids]


def test_the_last_card_of_a_task_that_ends_well_is_ours_and_metaflow_makes_its_other_cards(made):
    task, cards = made("torchrun", "default")
    cards.renew()
    assert task.commands == []
    task.end_well()
    assert tokens(task.stored()) == ("final", "final")
    assert [each["--type"] for each in task.commands] == ["default", "default"]


def test_a_task_that_is_to_make_none_makes_those_of_other_types_alone(made):
    task, _ = made("torchrun", "default")
    make_none()
    task.end_well()
    assert (task.stored(), task.metadata.registered) == ({}, [])
    assert [each["--type"] for each in task.commands] == ["default", "default"]


def test_a_users_card_with_parts_is_renewed_too_and_made_a_last_time_and_what_is_the_users_stays(made):
    task, cards = made("default", "default other")
    task.cards[0].append(cards.part(("outcome",)))
    cards.renew()
    task.cards[0].refresh({"mine": 1})  # Metaflow drops what comes too soon after another one, but not this
    cards.renew()
    cards.make_last(HANG_S)
    told = [("render_runtime", False), ("refresh", False), ("render_runtime", True), ("refresh", True)]
    assert [(each["--mode"], each["wait"]) for each in task.commands] == told
    with open(task.commands[-1]["--data-file"], encoding="utf-8") as file:
        assert json.load(file)["user"] == {"mine": 1}
