"""Makes a worker write its Python stacks at a signal, even while it hangs; `stacks` reads them.

The worker runs this file before its own program, and never imports it.
"""

import faulthandler  # built into the interpreter
import os

_folder, _number = os.environ.get("TORCHRUN_STACKS_FOLDER"), os.environ.get("TORCHRUN_STACKS_SIGNAL")
if _folder and _number:
    # It must be open beforehand: the handler runs outside of the interpreter, which may be stuck.
    _path = os.path.join(_folder, f"stacks-{os.getpid()}.txt")
    _file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(int(_number), file=_file, all_threads=True, chain=False)
