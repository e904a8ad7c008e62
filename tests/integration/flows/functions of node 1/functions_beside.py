"""What node 1 calls: another version of the same."""


def step():
    return "another step"
