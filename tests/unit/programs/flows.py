"""A flow file that runs its flow as soon as it is imported; and its flow's own methods are launched."""

import sys

from metaflow import FlowSpec, step


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
        for case in (self.launches, self.refusals):
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


def after():
    return getattr(sys.modules["__main__"], "REACHED", "the worker has not come here")


CarelessFlow()
REACHED = "the worker ran what follows the flow"
