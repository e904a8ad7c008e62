"""A launch goes on after the loss of a node: by a spare, by its task that is started again, or with fewer nodes."""

from __future__ import annotations

import re

import pytest

ALL = [0, 1, 2, 3]
CASES = {
    # spares, kills, nodes whose new task is killed too; nodes that the join gets, and of the last generation; left and came
    "a spare": (1, "1:KILL", "", [0, 2, 3], [0, 2, 3], [1], [3]),
    "told to end": (1, "2:TERM", "", [0, 1, 3], [0, 1, 3], [2], [3]),
    "all stopped": (1, "1:STOP", "", [0, 2, 3], [0, 2, 3], [1], [3]),
    "started again": (0, "1:KILL,2:KILL", "", ALL, ALL, [1, 2], [1, 2]),
    "fewer": (0, "1:KILL", "1", [0, 2, 3], [0, 2, 3], [1], []),
}
# A node of which all is stopped is continued, so that its supervisor stops the workers, and finds itself left out.
RAISED = {"told to end": {"error-2": "TorchrunPreempted"}, "all stopped": {"error-1": "LaunchFailed"}}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on(run_flow, name):
    spares, kills, again, joined, nodes, left, came = CASES[name]
    with_torch = name == "a spare"
    env = {"SPARES": str(spares), "WITH_TORCH": "1" if with_torch else ""}
    flow = run_flow("--kills", kills, "--again", again, flow="lost_node.py", env=env, stand_in=not with_torch)
    assert flow.note("joined") == joined
    for node, of_result, world_size, restarts in flow.note("results"):
        assert (of_result, world_size) == (nodes, len(nodes))
        if node not in left:  # a task that was started again knows only what came later
            # On a busy machine, of two nodes that are killed the second may be lost a restart later.
            assert sorted({node for restart in restarts for node in restart["left"]}) == left
            assert sorted({node for restart in restarts for node in restart["came"]}) == came
    last = max(int(path.name.split("-")[1]) for path in flow.out.glob("rank-*"))
    for rank in range(len(nodes)):
        assert flow.note(f"rank-{last}-{rank}") == [len(nodes), len(nodes), rank, len(nodes)]
    errors = {path.name: flow.note(path.name) for path in flow.out.glob("error-*")}
    assert {file: error["class"] for file, error in errors.items()} == RAISED.get(name, {})
    if name == "all stopped":
        assert "nothing arrived from it for 8 s (heartbeat_timeout_s)" in errors["error-1"]["message"]
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

    @torchrun(max_restarts=1, spare_nodes=2, node_check=["test $MF_PARALLEL_NODE_INDEX != 1"])
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
            if node == 1:
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
    """Node 1 is set aside: it had workers before, and would store, too. Node 2, a spare, takes its place and stays."""
    (tmp_path / "flow.py").write_text(STORES)
    flow = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert flow.wait() == 0, flow.text
    assert "FOUND [0, 7] 2 (0, 2) [0, 3]" in flow.text, flow.text
    assert flow.text.count("nodes 1, 3 leave: launch 0 has ended well without them") == 1, flow.text
    assert all(f"NODE {node} is out of run" in flow.text for node in range(4))
    said = "node 1] not needed any more; its step's code raised AttributeError: "
    assert said in flow.text, flow.text


def test_a_node_that_fails_its_check_takes_no_part(run_flow):
    check = "echo 3 MB are left; test $MF_PARALLEL_NODE_INDEX != 1"
    attrs = {"max_restarts": 1, "spare_nodes": 1, "node_check": [check]}
    flow = run_flow("--nodes", "3", attrs=attrs, do="1:once", stand_in=True)
    tasks = flow.note("end")["tasks"]
    assert [task["node"] for task in tasks] == [0, 2]
    (result,) = tasks[0]["results"]
    assert (result["nodes"], result["world_size"]) == ([0, 2], 2)
    assert [(each["left"], each["came"], each["cause"]["kind"]) for each in result["restarts"]] == [
        ([1], [2], "check"),
        ([], [], "exception"),
    ]
    # Before each generation; in the first one it may be stopped before it has written, since node 1's fails.
    assert flow.text.count("[node 0 node_check 1/1] 3 MB are left") in (2, 3)
    said = r"node 1 takes no part any more: node 1 \(host \S+\) failed: node_check 1/1 .* exited with code 1"
    assert re.search(said, flow.text), flow.text
    flow.await_gone()
