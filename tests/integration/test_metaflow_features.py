"""Metaflow's own features around gangs, in one flow: the table of docs/metaflow-features.md."""

from __future__ import annotations

import pytest
from flow_runs import content_of

pytestmark = pytest.mark.xdist_group("features")


@pytest.fixture(scope="module")
def features(start_shared_flow):
    flow = start_shared_flow("--tag", "mine", flow="features.py", stand_in=True)
    assert flow.wait() == 0, flow.text
    return flow


def seen_by_workers(flow, name):
    return {int(worker["env"]["RANK"]): worker for worker in flow.notes(f"{name}/worker-*")}


def test_what_metaflow_gives_a_step_gets_to_its_workers(features):
    """By @environment, @secrets, @project, a tag, IncludeFile and Config, beside @retry and @timeout."""
    workers = seen_by_workers(features, "written")
    assert sorted(workers) == [0, 1, 2, 3], "Config says how many there are on each of two nodes"
    for worker in workers.values():
        assert worker["argv"] == ["included *text* 🙂", "gangs.user.tester.FeaturesFlow"]
        assert (worker["env"]["FROM_ENVIRONMENT"], worker["env"]["FROM_SECRETS"]) == ("a b", "hush")
    assert features.note("end")[0] == [{"size": 4, "branch": "user.tester", "tags": ["mine"]}] * 2


def test_mutators_make_gangs_and_branches_have_them_side_by_side(features):
    """A FlowMutator has a StepMutator do it."""
    assert features.note("end")[1:] == [[2]]
    assert sorted(seen_by_workers(features, "mutated")) == [0, 1]


def test_spin_runs_a_step_of_two_nodes_as_a_gang_of_one(features, start_shared_flow):
    """The gang's card is there, too; Metaflow's own card can't be made of a spun step (2.19)."""
    spun = start_shared_flow("written", command="spin", flow="features.py", stand_in=True, env={"GANG_CARD": "1"})
    assert spun.wait() == 0, spun.text
    assert "on one node; in its run it had 2" in spun.text
    assert "decorator 'torchrun' as it is not" not in spun.text
    workers = seen_by_workers(spun, "written")
    assert {(rank, worker["env"]["WORLD_SIZE"]) for rank, worker in workers.items()} == {(0, "2"), (1, "2")}
    assert workers[0]["argv"][0] == "included *text* 🙂"
    assert workers[0]["env"]["FROM_ENVIRONMENT"] == "a b"
    (card,) = spun.home.parent.glob("flow folder/.metaflow_spin/mf.cards/**/torchrun-*.html")
    assert "1 node" in content_of(card.read_text())
    spun.await_gone()
    assert "have ended well" in spun.ask("show")
    assert "spin runs this step on one node" in spun.ask("logs")


def test_a_config_with_an_attribute_that_does_not_exist_is_refused(run_flow):
    """Metaflow checks what is written in the source, and nothing that configs and mutators add."""
    config = '{"attributes": {"max_restart": 1}, "gangs": ["mutated"]}'
    flow = run_flow(flow="features.py", expect=1, before=("--config-value", "config", config))
    assert "Did you mean max_restarts?" in flow.text
    assert "Task is starting" not in flow.text
