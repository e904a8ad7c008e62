"""What the programs here need to be a task: it launches functions in real workers, without torchrun, and checks."""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import closing, contextmanager

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Outcome:
    """What came of one function in one worker."""

    def __init__(self, call, done, rank, record):
        worker = Call("", (), False, nproc=1, num_nodes=rank + 1, node_index=rank, python="")
        self.done, self.rank, self.record = done, rank, record
        verdict = failed(LaunchFailed, FailureText(Cause("exception", 1, "h", rank), instead="the gang's words"))
        self.error = call.original(verdict, {})
        self.values = call.result(worker, {})["values"]
        self.went_wrong = self.error is not verdict and not isinstance(self.error, WorkerFailed)

    @property
    def value(self):
        assert self.done.returncode == 0, self.done.stderr
        return pickle.loads(self.values[self.rank])


def launch(function, arguments=None, rank=3):
    """Call a function in a worker; return its `Outcome`."""
    run = resolve(
        {"entrypoint": function, "entrypoint_args": arguments}, parse_settings({}, "train"), Position(1, 0, "")
    )
    with closing(FunctionCall(run, None)) as call:
        path = os.pathsep.join(filter(None, [WORKER_HOOKS, os.environ.get("PYTHONPATH")]))
        own = {"RANK": str(rank), "PYTHONPATH": path, "TORCHRUN_AGENT_PID": str(os.getpid())}
        own["TORCHELASTIC_ERROR_FILE"] = os.path.join(call.folder, "error.json")
        done = subprocess.run(
            [sys.executable, "-u", FUNCTION_WORKER, call.folder],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        return Outcome(call, done, rank, read_record(call.folder))


def value_of(function, arguments=None, **options):
    return launch(function, arguments, **options).value


@contextmanager
def no_cloudpickle():
    """Take cloudpickle away from this task."""
    kept, sys.modules["cloudpickle"] = sys.modules.get("cloudpickle"), None
    try:
        yield
    finally:
        del sys.modules["cloudpickle"]
        if kept:
            sys.modules["cloudpickle"] = kept


def refusal_of(function, arguments=None):
    """Return the words of the error that a launch ends with before it begins."""
    before = set(os.listdir(tempfile.gettempdir()))
    try:
        launch(function, arguments)
    except EntrypointError as error:
        assert set(os.listdir(tempfile.gettempdir())) == before, "files are left"
        return str(error)
    raise AssertionError("it was launched")


def main(program):
    """Run every case of a program; tell on stdout which failed, and how."""
    failed = {}
    for name, case in program.items():
        if name.startswith("case_"):
            try:
                case()
            except BaseException:
                failed[name] = traceback.format_exc()
    print(json.dumps(failed))


# Metaflow takes a second to import, and most programs here are none of its flows: so it comes from where it is
# installed into the task, and a module that can't be imported stands for it in the workers.
import pickle  # noqa: E402

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, LaunchFailed, WorkerFailed  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, FailureText, failed  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import WORKER_HOOKS  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.workers import read_record  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position, resolve  # noqa: E402
from metaflow_extensions.torchrun.plugins.torchrun.task.function_call import FUNCTION_WORKER, FunctionCall  # noqa: E402

if os.environ.get("NO_METAFLOW_IN_WORKERS"):
    sys.path.insert(0, os.path.join(FOLDER, "absent"))
