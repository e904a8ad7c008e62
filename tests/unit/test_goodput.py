"""Where the time of an attempt went, in histories whose sums a person has checked."""

import pytest
from gang_of import GangOf, crash

from metaflow_extensions.torchrun.plugins.torchrun.gang import messages as say
from metaflow_extensions.torchrun.plugins.torchrun.gang.goodput import Goodput, said


def of(*history, until):
    """Play lines such as (10, "go") and (20, "step", 5); return what is known in the end."""
    found = Goodput()
    for at_s, what, *more in history:
        if what == "go":
            found.go(*more or [False], at_s)
        elif what == "step":
            found.step(*more, at_s)
        elif what == "restart":
            found.restart()
        elif what == "run":
            found.all_run(at_s)
        else:
            found.enter(what, at_s)
    return found.until(until)


# 10 s own code, 20 s for the last node, 60 s until the first step, 100 s of progress until the failure at step 100. The
# restart: 5 s to stop, 55 s until step 61 again, and 40 s for steps 61 to 100. Then 700 s of progress, and 10 s to store.
RESTARTED = [
    *((10, "waiting"), (30, "go"), (35, "run"), (90, "step", 1), (190, "step", 100)),
    *(
        (190, "end"),
        (192, "restart"),
        (195, "go", True),
        (200, "run"),
        (250, "step", 61),
        (280, "step", 90),
        (290, "step", 101),
    ),
    *((990, "step", 800), (990, "end"), (1000, "own_code")),
]
# Two launches without a report: of the first, workers run for 95 s; of the second for 40 s and, after a restart, for 30 s.
SILENT = [
    *(
        (0, "waiting"),
        (0, "go"),
        (5, "run"),
        (100, "end"),
        (100, "own_code"),
        (160, "waiting"),
        (170, "go"),
        (180, "run"),
    ),
    *((220, "end"), (221, "restart"), (222, "go", True), (230, "run"), (260, "end"), (260, "own_code")),
]
# Steps that are counted anew in each epoch, and no other task in the place of a lost one.
EPOCHS = [
    *((0, "waiting"), (0, "go"), (10, "step", 0), (20, "step", 99), (30, "step", 49), (40, "step", 99), (40, "end")),
    *((42, "restart"), (90, "end")),
]
# A hang: 20 s of progress, and 100 s until it is ended.
HANGS = [(0, "waiting"), (0, "go"), (10, "step", 1), (30, "step", 20), (130, "end"), (140, "own_code")]
# A second failure before the steps of the first are done again: steps 1 to 10 three times, 11 to 20 twice.
TWICE = [
    *((0, "waiting"), (0, "go"), (10, "step", 1), (30, "step", 20), (30, "end"), (30, "restart"), (30, "go", True)),
    *((40, "step", 1), (50, "step", 10), (50, "end"), (50, "restart"), (50, "go", True), (60, "step", 1)),
    *((80, "step", 21), (100, "end")),
]


@pytest.mark.parametrize(
    ("history", "until", "seconds", "text"),
    [
        (
            RESTARTED,
            1000,
            {"own_code": 10, "waiting": 20, "start": 60, "progress": 800, "restarts": 100, "end": 10},
            "80 % of 16 min 40 s was progress. The step's own code 10 s; waiting for nodes 20 s; start 1 min 0 s; "
            "ending 10 s; 1 restart cost 1 min 40 s: 40 steps were done twice.",
        ),
        (
            SILENT,
            260,
            {"own_code": 60, "waiting": 10, "start": 15, "runs": 165, "restarts": 10},
            "Of 4 min 20 s: the step's own code 1 min 0 s; waiting for nodes 10 s; start 15 s; "
            "running 2 min 45 s; 1 restart cost 10 s.",
        ),
        (
            TWICE,
            100,
            {"start": 10, "progress": 20, "restarts": 50, "end": 20},
            "20 % of 1 min 40 s was progress. Start 10 s; ending 20 s; 2 restarts cost 50 s: 30 steps were done twice.",
        ),
        (
            HANGS,
            140,
            {"start": 10, "progress": 20, "end": 110},
            "14 % of 2 min 20 s was progress. Start 10 s; ending 1 min 50 s.",
        ),
        (
            EPOCHS,
            100,
            {"start": 10, "progress": 30, "restarts": 50, "end": 10},
            "30 % of 1 min 40 s was progress. Start 10 s; ending 10 s.",
        ),
        (HANGS[:4], 40, {"start": 10, "progress": 30}, "75 % of 40 s was progress. Start 10 s."),
        ([(3, "waiting")], 5, {"own_code": 3, "waiting": 2}, "Of 5 s: the step's own code 3 s; waiting for nodes 2 s."),
    ],
)
def test_the_classes_of_a_history_are_its_time(history, until, seconds, text):
    told = of(*history, until=until)
    assert {name.removesuffix("_s"): each for name, each in told.items() if name.endswith("_s")} == {
        **seconds,
        "total": until,
    }
    assert sum(seconds.values()) == until
    assert said(told) == text


def test_a_gang_tells_it_with_the_verdict():
    gang = GangOf(2)
    gang.pass_time(10)
    gang.all_ready(max_restarts=1)
    for generation, first in ((0, 1), (1, 3)):
        gang.pass_time(20)
        for step in range(first, 6 + 4 * generation):
            data = {"paces": {}, "points": {}, "step": step, "total": None}
            gang.say(0, say.Report("progress", 0, generation, data))
            gang.pass_time(2)
        if generation == 0:
            gang.fail(crash())
    gang.all_ended()
    (of_control,), (of_member,) = (gang.got(node, "Verdict") for node in (0, 1))
    # Steps 3 to 5 are done again, in 6 s; so the restart costs 26 s, and 2 s from the last step to the failure.
    wanted = {
        "own_code_s": 10,
        "start_s": 20,
        "progress_s": 14,
        "restarts_s": 28,
        "end_s": 2,
        "restarts": 1,
        "twice": 3,
    }
    told = of_control.goodput
    assert {name: told[name] for name in wanted} == wanted
    assert told["total_s"] == sum(each for name, each in told.items() if name.endswith("_s") and name != "total_s")
    assert of_member.goodput == {}
