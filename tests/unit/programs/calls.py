"""A program that launches what stands in it; every ``case_`` is one test of test_functions_worker.py."""

import dataclasses
import enum
import functools
import os
import sys
import threading
from typing import Any, NamedTuple

import beside

# --- what a flow file may hold --------------------------------------------------------------------


def add(a, b=2):
    return a + b


def give(value):
    return value


@beside.logged
def decorated(x):
    return x + 1


@functools.lru_cache
def cached(x):
    return x * 10


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0

    class Unit(enum.Enum):
        METRE = "m"


class Pair(NamedTuple):
    left: Any
    right: Any


class Tools:
    def __init__(self, factor):
        self.factor = factor

    @staticmethod
    def static(x):
        return x + 100

    @classmethod
    def made(cls, x):
        return cls(x)

    def scaled(self, x):
        return self.factor * x

    def __call__(self, x):
        return -self.factor * x


class BadLoss(Exception):
    def __init__(self, text, step):
        super().__init__(text, step)
        self.step = step
        self.point = Point(step)


class Unloadable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Undumpable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


CONFIG = {"of the worker": "RANK" in os.environ}


def surroundings():
    is_main = sys.modules["__main__"].add is add
    return [sys.argv, __file__, __name__, os.environ["RANK"], CONFIG, is_main, sys.path[0]]


def define():
    """Define a class while the function runs."""

    class Local:
        pass

    return Local.__module__


def fail(kind, *args):
    raise kind(*args)


def fail_noted():
    error = ValueError("noted")
    error.__notes__ = ["in epoch 3"]
    raise error


if __name__ != "__main__":
    task = None
else:
    import task
    from task import launch, refusal_of, value_of

# --- what can be called ---------------------------------------------------------------------------


def case_all_that_can_be_called():
    for function, arguments, value in (
        (add, {"b": 5, "a": 1}, 6),
        (add, ("a", "b"), "ab"),
        (define, None, "__main__"),
        (beside.double, [21], 42),
        (len, [[1, 2, 3]], 3),
        (Tools.static, [1], 101),
        (Tools(3).scaled, [2], 6),
        (Tools(4), [2], -8),
        (functools.partial(add, b=40), [2], 42),
        (functools.partial(Tools(3).scaled, 5), None, 15),
        (decorated, {"x": 1}, ("logged", 2)),
        (cached, [4], 40),
        (Point, {"x": 1, "y": 2}, Point(1, 2)),
    ):
        assert value_of(function, arguments) == value, function
    assert value_of(Tools.made, [5]).factor == 5


# --- what it finds ----------------------------------------------------------------------------------


def case_the_worker_looks_like_the_program():
    seen = [[__file__], __file__, "__main__", "12", {"of the worker": True}, True, sys.path[0]]
    assert value_of(surroundings, rank=12) == seen


# --- arguments and values ---------------------------------------------------------------------------


def case_functions_and_classes_go_by_name():
    things = [add, decorated, cached, Point, Point.Unit, Tools.scaled, Tools.static, beside.double]
    for back in (value_of(give, [things]), value_of(lambda: things)):
        assert [one is thing for one, thing in zip(back, things, strict=True)] == [True] * len(things)


def case_a_closure_sees_what_the_program_defines():
    offset = 5
    assert value_of(lambda x: Point(add(x, offset)), [1]) == Point(6)
    point, function = value_of(lambda: [Point(1), lambda x: x + 1])
    assert (type(point), function(1)) == (Point, 2)


def case_a_value_that_nothing_can_carry_names_rank_and_type():
    outcome = launch(threading.Lock, rank=5)
    assert outcome.done.returncode == 1
    assert not outcome.values
    assert type(outcome.error) is task.WorkerFailed
    assert "Rank 5 returned a _thread.lock, which can't be pickled: TypeError" in str(outcome.error)
    assert "the gang's words" in str(outcome.error)
    assert "Rank 5 returned a _thread.lock" in outcome.done.stderr
    assert outcome.record.exception.startswith("CantReturn: Rank 5 returned a _thread.lock")
    assert "function_worker" not in outcome.record.traceback + outcome.done.stderr


# --- what can't be sent -----------------------------------------------------------------------------


def case_without_cloudpickle_a_closure_is_refused_with_what_to_do():
    with task.no_cloudpickle():
        text = refusal_of(lambda: 1)
        assert value_of(add, [1, 1]) == 2
    assert "<lambda> can't be pickled (" in text
    assert "top level of the flow file" in text
    assert "install cloudpickle in the step's environment" in text


# --- exceptions ---------------------------------------------------------------------------------------

NOTE = "raised by rank 3 on node 1 (host h)"


def case_an_exception_comes_as_what_it_was():
    outcome = launch(fail, [BadLoss, "loss is nan", 4])
    error = outcome.error
    assert type(error) is BadLoss
    assert (error.args, error.step, error.point) == (("loss is nan", 4), 4, Point(4))
    assert error.__notes__ == [NOTE]
    assert outcome.done.returncode == 1
    assert "BadLoss: ('loss is nan', 4)" in outcome.done.stderr
    assert type(launch(fail, [beside.Elsewhere, "in a module"]).error) is beside.Elsewhere
    assert launch(fail_noted).error.__notes__ == ["in epoch 3", NOTE], "its own notes stay"


def case_an_exception_that_cannot_travel_comes_in_words():
    for kind, arguments, words, why in (
        (Unloadable, ["this", "that"], "", "can't be unpickled here (TypeError: "),
        (Undumpable, [], "Undumpable: holds a lock", "can't be pickled (TypeError: cannot pickle"),
    ):
        error = launch(fail, [kind, *arguments]).error
        assert type(error) is task.WorkerFailed, error
        assert all(text in str(error) for text in (words, why, "the gang's words")), error
        assert error.cause["rank"] == 3


def case_an_exit_code_or_ctrl_c_is_no_exception_of_the_function_and_no_value():
    for kind, arguments, code in ((SystemExit, [0], 0), (SystemExit, [3], 3), (KeyboardInterrupt, [], -2)):
        outcome = launch(fail, [kind, *arguments])
        assert outcome.done.returncode == code
        assert outcome.record is None
        assert not outcome.went_wrong
        assert not outcome.values


def case_an_import_that_fails_in_the_worker_is_its_exception():
    os.environ["FAIL_IMPORT"] = "1"
    try:
        outcome = launch(add, [1])
    finally:
        del os.environ["FAIL_IMPORT"]
    assert type(outcome.error) is ImportError
    assert str(outcome.error) == "no such library on this node"
    assert f'File "{__file__}"' in outcome.done.stderr


if __name__ == "__main__":
    task.main(globals())
elif os.environ.get("FAIL_IMPORT"):
    raise ImportError("no such library on this node")
