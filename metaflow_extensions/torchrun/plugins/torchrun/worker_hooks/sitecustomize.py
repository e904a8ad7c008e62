"""Lets a worker tell its Python stacks when it is asked to by a signal, even while it hangs.

Python imports the first module of this name on its path before it runs a script; `evidence.py` puts this
folder first. It registers the handler, steps aside, and lets the ``sitecustomize`` be imported that would
have been without it. It imports nothing that Python has not loaded already, and does nothing at all in a
process without the two variables.
"""

import os
import sys


def _answer_with_stacks() -> None:
    folder, number = os.environ.get("TORCHRUN_STACKS_FOLDER"), os.environ.get("TORCHRUN_STACKS_SIGNAL")
    if not folder or not number:
        return
    import faulthandler  # built into the interpreter

    # It must be open beforehand: the handler runs outside of the interpreter, which may be stuck.
    path = os.path.join(folder, f"stacks-{os.getpid()}.txt")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(int(number), file=file, all_threads=True, chain=False)


def _step_aside() -> None:
    """Import what would have been imported without us; its errors, and that there is none, are for `site` to see."""
    own = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != own]
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")


try:  # noqa: SIM105 - contextlib is not loaded yet
    _answer_with_stacks()
except Exception:  # noqa: S110 - a worker must start, whatever becomes of its stacks
    pass
_step_aside()
