"""A gang with a spare whose first attempt fails, for Argo Workflows: nothing here knows how it is scheduled."""

import json

from metaflow import FlowSpec, Parameter, current, retry, step, torchrun


def about(task):
    result = getattr(task, "result", None)  # the spare has none
    of_launch = [result.world_size, result.exit_codes] if result else [None, None]
    return [task.node, task.attempt, *of_launch, task.control_task_id, task.own_id]


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
        self.control_task_id, self.own_id = current.parallel.control_task_id, current.task_id
        env = {"ATTEMPT": self.attempt, "WORKER_DO": "3:kill-first"}
        self.result = current.torch.run(entrypoint="worker.py", env=env)
        self.next(self.join)

    @step
    def join(self, inputs):
        print("SEEN " + json.dumps([about(task) for task in inputs]))
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    RemoteArgo()
