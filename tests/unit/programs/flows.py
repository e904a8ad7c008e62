"""A flow file that runs its flow as soon as it is imported; and its flow's own methods are launched."""

import sys

from metaflow import FlowSpec, current, step

# What a worker's `current` must say as the task's does.
SAID = [
    *("flow_name", "run_id", "step_name", "task_id", "retry_count", "origin_run_id", "pathspec", "namespace"),
    *("username", "tags", "tempdir", "graph", "is_running_flow", "graph_info", "colour"),
]


def add(a, b):
    return a + b


class CarelessFlow(FlowSpec):
    factor = 3

    @staticmethod
    def triple(x):
        return 3 * x

    @classmethod
    def times(cls, x):
        return cls.factor * x

    def method(self, x):
        return x

    @step
    def start(self):
        import task

        self.failed = {}
        for case in (self.launches, self.tells, self.refusals):
            case(task)
        print("all cases passed")
        self.next(self.end)

    def launches(self, task):
        outcome = task.launch(add, [1, 2])
        assert outcome.value == 3
        assert outcome.done.stdout == outcome.done.stderr == ""  # no flow has begun to run
        assert task.value_of(self.triple, [4]) == 12
        assert task.value_of(self.times, [4]) == 12
        assert task.value_of(after) == "the worker has not come here"

    def tells(self, task):
        from metaflow_extensions.torchrun.plugins.torchrun.compat.current import current_for_workers

        class Trainer:
            pass

        # As decorators of others add to it.
        current._update_env({"colour": {"red": [1, None]}, "trainer": Trainer(), "checkpoint": Trainer()})
        there = task.value_of(look, current=current_for_workers())
        here = {name: getattr(current, name) for name in SAID}
        assert there["said"] == here, (there["said"], here)
        assert there["made"] == [current.run.pathspec, current.task.pathspec]
        assert len(there["refused"]) == len(SAID), there["refused"]
        assert there["withheld"][0] == (
            "current.trainer works in the task's process alone, not in the workers of current.torch.run. Use it in the "
            "step's code, and pass the function what it needs of it as an argument."
        )
        assert there["withheld"][1].endswith(" `Checkpoint()`, imported from metaflow, works in workers.")
        assert there["asked"] == [None, "default", False]
        # What a worker does to it stays there.
        assert task.value_of(spoil, current=current_for_workers()) == [None, {"red": []}, "mine"]
        assert [current.run_id, current.colour, current.get("own")] == [here["run_id"], {"red": [1, None]}, None]
        assert task.value_of(eval, ["'metaflow' in __import__('sys').modules"], current=current_for_workers()) is False

    def refusals(self, task):
        text = task.refusal_of(self.method, [1])
        assert "CarelessFlow.method is a method of the flow, and a flow can't be sent to the workers" in text
        assert "@staticmethod" in text
        of_flow = f"entrypoint_args[0] of add, a __main__.{type(self).__name__},"
        for function, arguments, what in ((add, [self, 1], of_flow), (lambda: self.factor, [], "<lambda>")):
            text = task.refusal_of(function, arguments)
            assert f"{what} can't be pickled, with cloudpickle neither (" in text
            assert "Pass data instead of open files, locks, connections, or the flow itself (self)." in text

    @step
    def end(self):
        pass


def look():
    refused, withheld = [], []
    for name in SAID:
        try:
            setattr(current, name, "mine")
        except AttributeError as error:
            refused.append(str(error))
    for name in ("trainer", "checkpoint"):
        try:
            getattr(current, name)
        except AttributeError as error:
            withheld.append(str(error))
    return {
        "said": {name: getattr(current, name) for name in SAID},
        "made": [current.run.pathspec, current.task.pathspec],
        "refused": refused,
        "withheld": withheld,
        "asked": [current.get("trainer"), current.get("trainer", "default"), "trainer" in current],
    }


def spoil():
    current.own = "mine"
    current._run_id = None
    del current.colour["red"][:]
    return [current._run_id, current.colour, current.own]


def after():
    return getattr(sys.modules["__main__"], "REACHED", "the worker has not come here")


CarelessFlow()
REACHED = "the worker ran what follows the flow"
