"""Gangs to look at: in a foreach one that succeeds and one that is tried again, and then one that fails."""

from around import Around
from metaflow import current, retry, step, torchrun
from notes import note


class SeenFlow(Around):
    @step
    def start(self):
        note("run", current.run_id)
        self.letters = ["a", "b"]
        self.next(self.branch, foreach="letters")

    @step
    def branch(self):
        self.letter = self.input
        self.next(self.train, num_parallel=2)

    @retry(times=1, minutes_between_retries=0)
    @torchrun
    @step
    def train(self):
        self.node = current.parallel.node_index
        note(f"letter-{self.letter}", current.parallel.control_task_id or current.task_id)
        print(f"step of {self.letter} *🙂*")
        fails = self.letter == "b" and current.retry_count == 0
        current.torch.run("worker.py", env={"WORKER_DO": "*:talk,1:raise" if fails else "*:talk"})
        self.next(self.join)

    @step
    def join(self, inputs):
        self.seen = sorted((i.letter, i.node) for i in inputs)
        self.next(self.merge)

    @step
    def merge(self, inputs):
        note("end", sorted(s for i in inputs for s in i.seen))
        self.next(self.again)

    @step
    def again(self):
        self.next(self.hurt, num_parallel=2)

    @torchrun(max_restarts=1)
    @step
    def hurt(self):
        current.torch.run("worker.py", env={"WORKER_DO": "1:exit3,0:sleep"})
        self.next(self.last)

    @step
    def last(self, inputs):
        self.next(self.end)


if __name__ == "__main__":
    SeenFlow()
