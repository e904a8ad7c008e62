"""All nodes try their network and measure an all-reduce, before the launch that trains."""

from metaflow import FlowSpec, LaunchFailed, Parameter, check_links, current, step, torchrun


def train():
    print("it trains")


class PreflightFlow(FlowSpec):
    nodes = Parameter("nodes", type=int, default=2, help="tasks of the train step, each one node of the job")
    nproc = Parameter("nproc", type=int, default=2, help="processes per node")

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @torchrun
    @step
    def train(self):
        try:
            current.torch.run(check_links, nproc_per_node=self.nproc)
        except LaunchFailed as error:
            print(f"node {current.torch.node_index}: the network is not fit for training:", error.cause["exception"])
            raise
        self.result = current.torch.run(train, nproc_per_node=self.nproc)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.launches = [node.result.launch for node in inputs]
        self.next(self.end)

    @step
    def end(self):
        print(f"all nodes reach each other; the training was launch {self.launches[0]}")


if __name__ == "__main__":
    PreflightFlow()
