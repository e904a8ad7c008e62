from metaflow import FlowSpec, Parameter, card, current, step, torchrun


def train(lr):  # each rank calls it
    import torch
    from metaflow_torchrun import report
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 1))  # averages the gradients of all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for n in range(200):
        inputs = torch.randn(64, 8)  # each rank has data of its own
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step=n, total=200, loss=loss)
    print(f"done, with a loss of {loss.item():.4f}")


class Train(FlowSpec):
    lr = Parameter("lr", default=0.01)

    @step
    def start(self):
        self.next(self.train, num_parallel=2)  # two nodes

    @card(type="torchrun")
    @torchrun
    @step
    def train(self):
        args = {"lr": self.lr}
        # process_group connects the ranks: gloo over CPUs; "auto" takes NCCL with GPUs.
        # result has the metrics and what each rank has returned.
        self.result = current.torch.run(train, args, nproc_per_node=2, process_group="gloo")
        self.next(self.join)

    @step
    def join(self, inputs):
        self.result = inputs[0].result  # node 0's
        self.next(self.end)

    @step
    def end(self):
        print(f"loss {self.result.metrics.get('loss', 0.0):.4f}")


if __name__ == "__main__":
    Train()
