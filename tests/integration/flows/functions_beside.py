"""What node 0 calls."""


def step():
    return "one step"
