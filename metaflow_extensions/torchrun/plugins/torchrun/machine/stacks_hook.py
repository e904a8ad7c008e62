"""Makes a worker write its Python stacks at a signal, even while it hangs; `stacks` reads them.

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
    # It must be open beforehand: the handler runs outside of the interpreter, which may be stuck.
    _path = os.path.join(_folder, f"stacks-{os.getpid()}.txt")
    _file = _moved(os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    # The stacks of all threads: the handler reads frames that their threads may change meanwhile, and about one time in
    # 3 000 that ends the process (CPython issue 116008, seen with 3.11). So this signal comes only before an end.
    faulthandler.register(int(_number), file=_file, all_threads=True, chain=False)
    # The stack of the thread that gets the signal, which is the main one: that is safe at any time.
    faulthandler.register(int(_number) - 1, file=_file, all_threads=False, chain=False)
