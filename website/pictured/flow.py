"""Makes the cards of a hang and of a restart for the pages' pictures; website/pictures.py runs it."""

from metaflow import FlowSpec, Parameter, card, current, step, torchrun


class TrainFlow(FlowSpec):
    how = Parameter("how", help="what rank 2 does at step 4: hang, or be killed once")

    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @card(type="torchrun")
    @torchrun
    @step
    def train(self):
        is_hang = self.how == "hang"
        current.torch.run(
            "train.py",
            {"how": self.how},
            nproc_per_node=2,
            max_restarts=0 if is_hang else 1,
            hang_timeout_s=20 if is_hang else None,  # workers are silent while they import torch
        )
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    TrainFlow()
