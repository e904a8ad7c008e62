"""A launch goes on after the loss of a node: with a spare, or with fewer nodes."""

from __future__ import annotations

import pytest

CASES = {
    # spares, kills, nodes of the last generation, which the join gets; left and came
    "a spare": (1, "1:KILL", [0, 2, 3], [1], [3]),
    "told to end": (1, "2:TERM", [0, 1, 3], [2], [3]),
    "fewer": (0, "1:KILL,2:KILL", [0, 3], [1, 2], []),
}
RAISED = {"told to end": {"error-2": "TorchrunPreempted"}}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on(run_flow, name):
    spares, kills, nodes, left, came = CASES[name]
    with_torch = name == "a spare"
    env = {"SPARES": str(spares), "WITH_TORCH": "1" if with_torch else ""}
    flow = run_flow("--kills", kills, flow="lost_node.py", env=env, stand_in=not with_torch)
    assert flow.note("joined") == nodes
    for of_result, world_size, restarts in flow.note("results"):
        assert (of_result, world_size) == (nodes, len(nodes))
        # On a busy machine, of two nodes that are killed the second may be lost a restart later.
        assert sorted({node for restart in restarts for node in restart["left"]}) == left
        assert sorted({node for restart in restarts for node in restart["came"]}) == came
    last = max(int(path.name.split("-")[1]) for path in flow.out.glob("rank-*"))
    for rank in range(len(nodes)):
        assert flow.note(f"rank-{last}-{rank}") == [len(nodes), len(nodes), rank, len(nodes)]
    errors = {path.name: flow.note(path.name) for path in flow.out.glob("error-*")}
    assert {file: error["class"] for file, error in errors.items()} == RAISED.get(name, {})
    flow.await_gone()


@pytest.mark.parametrize(("kills", "late"), [("9:KILL", "1"), ("1:KILL", "2"), ("2:KILL", "1")])
def test_a_node_that_ends_badly_after_its_step_fails_the_run(kills, late, run_flow):
    flow = run_flow("--kills", kills, "--late", late, flow="lost_node.py", expect=1, stand_in=True)
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
        except BaseException:
            if node != 3:
                raise
            # Swallowed: the next call raises it again.
        finally:
            print("NODE", node, "is out of run")
            if node == 2:
                self.result.rank(0)  # an error of its own
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
    assert "FOUND [0, 7] 2 (0, 1) [0, 3]" in flow.text, flow.text
    assert flow.text.count("nodes 2, 3 leave: launch 0 has ended well without them") == 1, flow.text
    assert all(f"NODE {node} is out of run" in flow.text for node in range(4))
    said = "node 2] not needed any more; its step's code raised AttributeError: "
    assert said in flow.text, flow.text
