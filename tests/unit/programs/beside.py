"""A module beside a program."""

import functools


def double(x):
    return 2 * x


def logged(function):
    """Decorate as most decorators do."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ("logged", function(*args, **kwargs))

    return wrapper


class Elsewhere(Exception):
    pass
