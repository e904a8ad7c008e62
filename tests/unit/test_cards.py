"""The cards that a task makes of its gang, in Metaflow's store of cards."""

import json

from fake_cards import cards_of_task
from gang_views import Story, crash
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards


def tokens(found, name="torchrun"):
    """Return those of a page and of its data: a browser loads the page again where they differ."""
    page, data = found[f"{name}.html"], json.loads(found[f"{name}.json"])
    return page.split('METAFLOW_RELOAD_TOKEN = "')[1].split('"')[0], data["reload_token"]


def test_a_card_is_made_while_its_step_runs_and_for_the_last_time_when_that_fails(monkeypatch, tmp_path):
    task = cards_of_task(monkeypatch, tmp_path, "torchrun", "torchrun create")
    cards = Cards(task.datastore)
    cards.shown = lambda: Story().running().view
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
    eventually(lambda: not list((tmp_path / "inputs").iterdir()), "the end of our input files")
