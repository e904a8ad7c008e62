"""A step that changes its own process, and the streams that it prints to, around its launches."""

import contextlib
import io
import os
import signal
import sys

from around import Around
from metaflow import current, step, torchrun
from notes import note

SEES = """
import json, os, sys
seen = {"cwd": os.getcwd(), "step": os.environ["FROM_STEP"]}
with open(os.path.join(os.environ["GANG_OUT"], "seen-" + os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
"""
PRINTS = ["sh", "-c", 'echo "größe * $WHERE of $RANK"; echo "error in $WHERE of $RANK" >&2']


def has_child() -> bool:
    """Tell whether this process has a child, without taking its end from anybody."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


class OwnCodeFlow(Around):
    @torchrun(warm=os.environ.get("WARM", "agent"))
    @step
    def train(self):
        node, out = current.parallel.node_index, os.environ["GANG_OUT"]
        os.environ["FROM_STEP"] = "größe"
        os.makedirs(here := os.path.join(out, f"here-{node}"))
        os.chdir(here)
        signal.signal(signal.SIGCHLD, lambda *_: self.ends.append(1))
        self.ends = []
        current.torch.run([sys.executable, "-c", SEES])
        note(f"children-{node}", {"ends": len(self.ends), "living": has_child()})

        got = io.StringIO()
        with contextlib.redirect_stdout(got):
            current.torch.run(PRINTS, env={"WHERE": "memory"})
        note(f"memory-{node}", got.getvalue())

        terminal = os.dup(1)
        with open(os.path.join(out, f"file-{node}"), "wb") as file:
            os.dup2(file.fileno(), 1)
            try:
                current.torch.run(PRINTS, env={"WHERE": "a file"})
            finally:
                os.dup2(terminal, 1)
        current.torch.run(PRINTS, env={"WHERE": "the terminal"})
        self.next(self.join)


if __name__ == "__main__":
    OwnCodeFlow()
