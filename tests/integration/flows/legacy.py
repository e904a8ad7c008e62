"""Written as for metaflow-torchrun 0.2."""

from metaflow import FlowSpec, current, step, torchrun


class LegacyFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @torchrun(all_nodes_started_timeout=60, nproc_per_node=2)
    @step
    def train(self):
        for _ in range(2):
            current.torch.run(
                torchrun_args={"max_restarts": 0, "nproc_per_node": "2", "rdzv_id": "mine", "tee": "3"},
                entrypoint="worker.py",
                entrypoint_args={"epochs": 3, "flag": None, "name": "a b"},
                push_results_dir_to_cloud=True,
                local_output_dir="out",
            )
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    LegacyFlow()
