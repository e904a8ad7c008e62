"""A launch goes on after the loss of a node: with a spare, or with fewer nodes."""

from __future__ import annotations

import re

import pytest

CASES = {
    # spares, the ranks whose nodes are killed, what their tasks raise
    "a spare": (1, "1:KILL", []),
    "told to end": (1, "2:TERM", ["TorchrunPreempted"]),
    "fewer": (0, "1:KILL,2:KILL", []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on(run_flow, name):
    """Four nodes come; which of them is the spare is as it happens."""
    spares, kills, raised = CASES[name]
    with_torch = name == "a spare"
    env = {"SPARES": str(spares), "WITH_TORCH": "1" if with_torch else ""}
    flow = run_flow("--kills", kills, flow="lost_node.py", env=env, stand_in=not with_torch)
    nodes = flow.note("joined")  # those of the last generation
    for of_result, world_size, restarts in flow.note("results"):
        assert (of_result, world_size) == (nodes, len(nodes))
        # On a busy machine, of two nodes that are killed the second may be lost a restart later.
        left, came = ({node for restart in restarts for node in restart[what]} for what in ("left", "came"))
        assert (len(left), len(came)) == (kills.count(":"), spares)
        assert sorted([*nodes, *left]) == [0, 1, 2, 3]
        assert came < set(nodes)
    last = max(int(path.name.split("-")[1]) for path in flow.out.glob("rank-*"))
    for rank in range(len(nodes)):
        assert flow.note(f"rank-{last}-{rank}") == [len(nodes), len(nodes), rank, len(nodes)]
    errors = [(path.name, flow.note(path.name)["class"]) for path in flow.out.glob("error-*")]
    assert errors == [(f"error-{node}", error) for node, error in zip(sorted(left), raised, strict=False)]
    flow.await_gone()


@pytest.mark.parametrize(("kills", "late"), [("9:KILL", "1"), ("1:KILL", "2"), ("2:KILL", "1")])
def test_a_node_that_ends_badly_after_its_step_fails_the_run(kills, late, run_flow):
    words = ("--kills", kills, "--late", late)
    flow = run_flow(*words, flow="lost_node.py", env={"SPARES": "0"}, expect=1, stand_in=True)
    assert "Subprocess failed, return code" in flow.text
    assert not (flow.out / "joined").exists()
    flow.await_gone()


STORES = """
import os

from metaflow import FlowSpec, current, step, torchrun


def rank(x):
    open("made.txt", "w").write("by rank " + os.environ["RANK"])
    return {"weights": x * int(os.environ["RANK"])}


class Stores(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=4)

    @torchrun(max_restarts=1, spare_nodes=2)
    @step
    def train(self):
        node = current.parallel.node_index
        try:
            self.result = current.torch.run(rank, [7], gather=True, outputs="made.txt", outputs_from="all")
        except Exception as error:
            raise RuntimeError("no except Exception sees that a node is not needed") from error
        except BaseException:  # two nodes are not needed
            try:
                os.mkdir("swallowed")  # by one of them: the next call raises it again
            except FileExistsError:
                self.result.rank(0)  # an error of its own
        finally:
            print("NODE", node, "is out of run")
        self.weights = current.torch.run(rank, [3]).local_rank(0)["weights"]
        self.next(self.join)

    @step
    def join(self, inputs):
        control, other = (node.result for node in inputs)
        found = [value["weights"] for value in control], len(list(control.outputs)), control.nodes
        print("FOUND", *found, [node.weights for node in inputs])
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    Stores()
"""


def test_nodes_that_are_not_needed_leave_when_the_first_launch_has_ended_well(start_flow, tmp_path):
    (tmp_path / "flow.py").write_text(STORES)
    flow = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert flow.wait() == 0, flow.text
    (took_part,) = re.findall(r"FOUND \[0, 7\] 2 \(0, ([1-3])\) \[0, 3\]", flow.text)
    leaving = [node for node in range(1, 4) if node != int(took_part)]
    said = "node {} leaves: launch 0 has ended well without it"
    assert [flow.text.count(said.format(node)) for node in leaving] == [1, 1], flow.text
    assert all(f"NODE {node} is out of run" in flow.text for node in range(4))
    (failed,) = re.findall(r"node (\d)\] not needed any more; its step's code raised AttributeError: ", flow.text)
    assert int(failed) in leaving
