"""Nodes of one training are killed at random, again and again; it ends with the weights of an undisturbed one.

`--campaign=8x6` kills 6 times on 8 nodes, and 6 spare nodes wait. The training has the real torch, and gloo; a stand-in
for torchrun starts its workers, since each restart would else import torch twice on each node.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import psutil
import pytest
from flow_runs import FlowRun, supervisor
from gangs import Outcome
from limits import eventually, limit_s

SEED = 7
STEP_S = 120  # until all ranks have made a step after a loss
DELAY_S = 1.0  # the most that they then have until the next loss
WITH_SUPERVISOR, TWO = 0.2, 0.1  # how often
WORKER = [{"entrypoint": "campaign_worker.py"}]


class Campaign:
    """The losses of one run."""

    def __init__(self, flow: FlowRun) -> None:
        self._flow, self._random = flow, random.Random(SEED)
        self.lost: Counter[int] = Counter()  # how often each node was
        self.made = -1  # the last generation that has made a step

    def await_step(self) -> None:
        """Wait until the workers have made a step after the last loss."""

        def made() -> list[int]:
            assert self._flow.process.poll() is None, self._flow.text
            return [n for path in self._flow.out.glob("made-*[0-9]") if (n := int(path.name[5:])) > self.made]

        self.made = max(eventually(made, lambda: self._flow.text, limit_s(STEP_S)))

    def strike(self, most: int) -> None:
        """Lose a node, or two of them, at a random time."""
        time.sleep(self._random.uniform(0, DELAY_S))
        nodes = [node for node in self._flow.notes(f"on-{self.made}-*") if node != 0]
        victims = self._random.sample(nodes, min(most, 2 if self._random.random() < TWO else 1))
        for node in victims:
            task = psutil.Process(self._flow.note(f"task-{node}")["pid"])
            with_supervisor = self._random.random() < WITH_SUPERVISOR
            for process in [*([supervisor(self._flow, task.pid)] if with_supervisor else []), task]:
                process.send_signal(signal.SIGKILL)
            self.lost[node] += 1


@pytest.fixture
def train(start_flow):
    """Return a function that starts the training."""

    def start(nodes: int, spares: int = 0, **env: str) -> FlowRun:
        attrs = {"max_restarts": spares, "spare_nodes": spares, "grace_s": 5}
        words = ("--nodes", str(nodes + spares))
        return start_flow(*words, attrs=attrs, runs_=WORKER, env=env, stand_in=True)

    return start


def check_training(flow: FlowRun, campaign: Campaign, nodes: int) -> None:
    tasks = flow.note("end")["tasks"]
    result = tasks[0]["results"][0]
    restarts = result["restarts"]
    assert [task["node"] for task in tasks] == result["nodes"], "the join gets no node that was left as a spare"
    assert len(tasks) == nodes
    assert [each["generation"] for each in restarts] == [*range(1, len(restarts) + 1)]
    lost = Counter(node for event in result["events"] if event["kind"] == "lost" for node in event["nodes"])
    assert lost == campaign.lost
    assert all(each["left"] and each["came"] for each in restarts)
    assert Counter(node for each in restarts for node in each["left"]) <= lost
    assert not flow.notes("twice-*")
    steps = [flow.note(f"made-{each}") for each in range(campaign.made + 1) if (flow.out / f"made-{each}").exists()]
    assert steps == sorted(set(steps))  # each generation goes on after what the one before has made


@pytest.mark.timeout(7200)
def test_a_training_whose_nodes_are_killed_at_random(train, recorder, pytestconfig):
    nodes, kills = map(int, pytestconfig.getoption("--campaign").split("x"))
    flow, begun = train(nodes, kills), time.monotonic()
    campaign = Campaign(flow)
    campaign.await_step()
    while (left := kills - campaign.lost.total()) > 0:
        campaign.strike(left)
        campaign.await_step()
    (flow.out / "finish").touch()
    assert flow.wait() == 0, flow.text
    flow.await_gone()
    seconds, trained = time.monotonic() - begun, flow.note("trained")
    told = f"{kills} random kills of tasks on {nodes} nodes; the weights are those of an undisturbed training"
    recorder.lasted(told, Outcome(seconds, {}, [], 0))
    print(f"{campaign.made} restarts, {trained['steps']} steps, {seconds:.0f} s")
    check_training(flow, campaign, nodes)
    undisturbed = train(nodes, CAMPAIGN_STEPS=str(trained["steps"]))
    assert undisturbed.wait() == 0, undisturbed.text
    assert undisturbed.note("trained") == trained
