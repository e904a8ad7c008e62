"""A gang of which nodes are lost while they train; the others go on."""

import atexit
import os

from metaflow import FlowSpec, Parameter, current, step, torchrun
from notes import note


class LostNode(FlowSpec):
    nodes = Parameter("nodes", default=4)
    kills = Parameter("kills", default="1:KILL")  # ranks, each with the signal that its task gets
    late = Parameter("late", default="")  # nodes whose tasks end badly in the end

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun(
        max_restarts=3, spare_nodes=int(os.environ.get("SPARES", "1")), min_nodes=2, grace_s=5, heartbeat_timeout_s=8
    )
    @step
    def train(self):
        node = current.parallel.node_index
        note(f"task-{node}", os.getpid())
        try:
            self.result = current.torch.run("lost_node_worker.py", env={"KILLS": self.kills})
        except Exception as error:
            note(f"error-{node}", {"class": type(error).__name__, "message": str(error)})
            raise
        if str(node) in self.late:
            atexit.register(os._exit, 3)  # after the node has left the gang
        self.node = node
        self.next(self.join)

    @step
    def join(self, inputs):
        note("joined", [each.node for each in inputs])
        note(
            "results",
            [[list(each.result.nodes), each.result.world_size, each.result.restarts] for each in inputs],
        )
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    LostNode()
