"""Notes what a program sees of itself, in the file that ``SEEN`` names; see tests/integration/test_before_run.py."""

import json
import os
import sys

OWN = [
    "RUN_ID",
    "PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHRUN_",
    "PYTHONPATH",
    "NODE_TEST_MARK",
    "CHAOS_",
    "METAFLOW_USER",
]

seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "optimize": sys.flags.optimize,
    "debug": __debug__,
    "name": __name__,
    "cwd": os.getcwd(),
    "stdin": os.readlink("/proc/self/fd/0"),
    # 200 is ours, far above those of a program (`worker_hooks`).
    "files": sorted({int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")} - {200}),
    "session": os.getsid(0) == os.getpid(),
    "path": sys.path,
    "env": {name: value for name, value in os.environ.items() if not any(own in name for own in OWN)},
}
with open(f"{os.environ['SEEN']}-{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
