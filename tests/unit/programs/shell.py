"""Run by ``python -``, so that it is a program without a file, as a notebook is."""

import beside
import task


class Cell:
    def __init__(self, x):
        self.x = x


def square(cell):
    return Cell(cell.x**2)


def give(thing):
    return thing


def case_a_modules_function_takes_what_a_cell_defines():
    back = task.value_of(beside.logged(give), [Cell(2)])
    assert type(back[1]) is Cell


def case_a_modules_function_needs_no_cloudpickle():
    with task.no_cloudpickle():
        assert task.value_of(beside.double, [4]) == 8


def case_without_cloudpickle_it_says_that_the_program_has_no_file():
    for function, arguments in ((square, [Cell(1)]), (beside.double, [Cell(1)])):
        with task.no_cloudpickle():
            text = task.refusal_of(function, arguments)
        assert "is of this program, which has no file to import it from" in text
        assert "install cloudpickle" in text


task.main(globals())
