"""A gang with a spare whose first attempt fails, for Argo Workflows: nothing here knows how it is scheduled."""

from metaflow import FlowSpec, Parameter, current, retry, step, torchrun


class RemoteArgo(FlowSpec):
    nodes = Parameter("nodes", default=1, type=int)  # what triggers the workflow says more

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @retry(times=1, minutes_between_retries=0)
    @torchrun(nproc_per_node=2, max_restarts=1, restart_on="node_lost", spare_nodes=1)
    @step
    def train(self):
        self.node, self.attempt = current.parallel.node_index, current.retry_count
        self.control_task_id = current.parallel.control_task_id
        env = {"ATTEMPT": self.attempt, "WORKER_DO": "3:kill-first"}
        self.result = current.torch.run(entrypoint="worker.py", env=env)
        self.next(self.join)

    @step
    def join(self, inputs):
        self.seen = sorted((i.node, i.attempt, hasattr(i, "result")) for i in inputs)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    RemoteArgo()
