"""Fails under torchelastic's @record, silently on stderr."""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record


def deep():
    raise RuntimeError("recorded by torchelastic")


@record
def main():
    if os.environ["RANK"] == "1":
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        deep()


main()
