"""Before they train, the nodes check their links: unreachable nodes and slow links are named."""

from metaflow import FlowSpec, Parameter, current, step, torchrun


def train():
    print("it trains")


class CheckLinksFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        current.torch.run("check_links.py", nproc_per_node=self.nproc)
        current.torch.run(train, nproc_per_node=self.nproc)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        print("all nodes reach each other, and have trained")


if __name__ == "__main__":
    CheckLinksFlow()
