"""Makes a worker write the Python stack of its main thread at a signal, even while it hangs; `stacks` reads it.

The worker runs this file before its own program, and never imports it.
"""

import faulthandler  # built into the interpreter
import os

# Far above the numbers that a program's own files get: the kernel gives the lowest free one, and a script may expect it.
# A program that closes all files, as a daemon does, and opens others does not meet this number soon either.
_HIGH = 200


def _moved(file: int) -> int:
    """Return the file under its high number, or as it is where that number is taken or over the limit."""
    try:
        os.fstat(_HIGH)
    except OSError:  # nobody has it
        try:
            os.dup2(file, _HIGH, inheritable=False)
        except OSError:  # over the limit of open files
            return file
        os.close(file)
        return _HIGH
    return file


_folder, _number = os.environ.get("TORCHRUN_STACKS_FOLDER"), os.environ.get("TORCHRUN_STACKS_SIGNAL")
if _folder and _number:
    # It must be open beforehand: the handler runs outside of the interpreter, which may be stuck. Without a name it
    # leaves nothing behind, however the worker ends; `stacks` finds it among the worker's open files.
    _path = os.path.join(_folder, f"torchrun-stacks-{os.getpid()}")
    _file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.unlink(_path)
    # The stack of the thread that gets the signal, which is the main one. All threads would be a risk: the handler reads
    # frames that their threads change meanwhile, and about one time in 3 000 that ends the process (CPython issue
    # 116008, seen with 3.11).
    faulthandler.register(int(_number), file=_moved(_file), all_threads=False, chain=False)
