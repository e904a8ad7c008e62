"""A spare: a process that has imported torch and waits to be told what to run.

A spare agent becomes torchrun, a spare worker becomes a script or a module. Spare workers are children of the spare
agent, which gives one to torchrun whenever torchrun starts a worker. `Spare` is the parent's side; run as a program,
this file is the spare itself. It then stands alone: the package around it is on no path there, and a user's module may
have any name.

A request travels over a socket: the length of the rest, with the two files for the program's output; then JSON. An
empty line is the answer that the request is accepted. Any other line says why it is not; the spare has ended then.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader
from typing import Any

AGENT = "torch.distributed.run"
# Its `Popen` is what torchrun starts its workers with (torch 2.3 to 2.13: `SubprocessHandler._popen`).
POPEN_OF_WORKERS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Names the kind of a spare to ``worker_hooks/sitecustomize.py``, which leaves itself in `sys.modules` under `_HOOKS`.
KIND = "TORCHRUN_SPARE"
_HOOKS = "torchrun_worker_hooks"
_AGENT_PID = "TORCHRUN_AGENT_PID"
ANSWER_S = 60.0  # of all spares of a launch; most of it for imports that a cold start would have to make, too
_LOOK_S = 0.1
_LOWEST = 19  # a nice value
_HEADER = 8  # bytes

# Variables that count when something is loaded, by how they begin: the interpreter, libraries, torch's own modules.
# From what Python code and getenv(3) looked up while torch 2.13 (CPU build) was imported, and the families of those.
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "HOME", "OPENSSL_", "SSL_"),
    *("LOGLEVEL", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCHEXPORT_", "FX_", "COMPILE_STROBELIGHT_"),
    *("TORCH_", "PYTORCH_", "C10_", "ATEN_", "KINETO_", "GLOG_", "NPY_", "NUMPY_", "GFORTRAN_", "INTEL_"),
)
# Only who computes reads these. An agent does not, and hands them to its workers.
_READ_TO_COMPUTE = (
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ACC_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_", "HSA_", "XLA_", "NEURON_", "HABANA_"),
    *("TMPDIR", "TEMP", "TMP", "XDG_", "USE_", "I_MPI_", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
# Packages whose variables do not begin with their names.
_OTHER_PREFIXES = {"hf": "huggingface_hub", "mplbackend": "matplotlib", "mplconfigdir": "matplotlib"}
# torch reads these when a process group is made (ProcessGroupNCCL.hpp, 2.13).
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_")


class Refused(Exception):
    """The spare does not become this program; the text says why."""


# --- the parent's side --------------------------------------------------------------------------


class Spare:
    """A spare process, as its parent holds it; belongs to one thread."""

    def __init__(self, kind: str, options: Mapping[str, Any], env: Mapping[str, str], news: int | None, **more: Any):
        self._modules = options["modules"]
        self._server, theirs = socket.socketpair()
        # What the imports write is shown when the program begins, as if the program had imported them.
        with tempfile.TemporaryFile() as out, theirs:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_let_go`
            told = {**options, "kind": kind, "client": theirs.fileno(), "news": news}
            self.process = subprocess.Popen(
                [sys.executable, "-u", os.path.abspath(__file__), json.dumps(told)],
                env={**env, KIND: kind},
                stdout=out,
                stderr=self._errors,
                pass_fds=[theirs.fileno(), *([] if news is None else [news])],
                start_new_session=True,
                **more,
            )

    def become(
        self,
        request: Mapping[str, Any],
        stdout: int,
        stderr: int,
        deadline: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> subprocess.Popen[bytes]:
        """Have it become what `request` describes; return its process. Whatever goes wrong ends it.

        `deadline` is of the monotonic clock.
        """
        try:
            told = json.dumps({**request, "priority": os.getpriority(os.PRIO_PROCESS, 0)}).encode()
            refusal = self._exchange(told, [stdout, stderr], deadline, is_wanted)
            if refusal:
                raise Refused(refusal)
        except ConnectionError as error:
            last_words = self._last_words()
            self.end()
            raise Refused(f"the spare process has ended{last_words}") from error
        except BaseException:
            self.end()
            raise
        self._let_go()
        self.process.args = request["argv"]
        return self.process

    def _exchange(self, rest: bytes, files: Sequence[int], deadline: float, is_wanted: Callable[[], bool]) -> str:
        """Send a request and return the answer; the spare may still import, and reads nothing then."""
        answer = b""
        self._server.setblocking(False)
        socket.send_fds(self._server, [len(rest).to_bytes(_HEADER, "big")], files)
        with suppress(
            OSError
        ):  # it may be gone, or nobody may raise its priority; who lowers it later sees the request
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        while not answer.endswith(b"\n"):
            readable, writable, _ = select.select([self._server], [self._server] if rest else [], [], _LOOK_S)
            if readable:
                if not (part := self._server.recv(65536)):
                    raise ConnectionError
                answer += part
            elif writable:
                rest = rest[self._server.send(rest) :]
            elif self.process.poll() is not None:  # what it has forked may hold the other end
                raise ConnectionError
            elif not is_wanted():
                raise Refused("the launch was stopped")
            elif time.monotonic() > deadline:
                what = ", ".join(self._modules)
                raise Refused(f"within {ANSWER_S:g} s it did not answer; it imports {what}, or somebody has stopped it")
        return answer.decode(errors="replace").strip()

    def _last_words(self) -> str:
        """Return the last line that it has written to its stderr."""
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").split("\n") if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def _let_go(self) -> None:
        self._server.close()
        self._errors.close()

    def end(self) -> None:
        """End it, and what its imports have started; after it has become a program nobody must."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._let_go()


def in_words(error: BaseException) -> str:
    """Return why a spare could not be used."""
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"


# --- the spare's side: what must still hold -----------------------------------------------------------


class Imports:
    """What this process has imported, and what that depends on: variables, files, and its search path."""

    def __init__(self, modules: Sequence[str], folder: str, computes: bool) -> None:
        self._folder = folder  # was first on the path
        self._computes = computes
        self._fault = ""  # why no program may run here
        self._env = dict(os.environ)
        try:
            for name in modules:
                importlib.import_module(name)
        except BaseException as error:
            self._fault = f"{name} could not be imported: {type(error).__name__}: {error}"
        now = dict(os.environ)
        self._set = {name: now.get(name) for name in {*now, *self._env} if now.get(name) != self._env.get(name)}
        self._files = dict(_files_of_modules())
        if computes:  # an optional package may come later, or a ``.pth`` file; an agent needs neither
            installed = [entry for entry in sys.path if entry.endswith("-packages")]
            self._files.update({entry: known for entry in installed if (known := _version(entry)) is not None})
        fixed = {*sys.builtin_module_names, "__main__", "__mp_main__"}  # `import` finds these first, or not at all
        self._modules = {name: module for name, module in sys.modules.items() if "." not in name and name not in fixed}

    def check(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Raise `Refused` if a program that starts now could import something else than is here."""
        if self._fault:
            raise Refused(self._fault)
        if argv[:2] != [sys.executable, "-u"] or (argv[2].startswith("-") and argv[2] != "-m"):
            raise Refused(f"it runs {' '.join(argv[:3])}, not {sys.executable} -u with a script or a module")
        differing = [name for name in {*env, *self._env} if env.get(name) != self._env.get(name) and self.counts(name)]
        if differing:
            raise Refused(f"{', '.join(sorted(differing))} had another value when torch was imported")
        for file, known in self._files.items():
            if _version(file) != known:
                raise Refused(f"{file} has changed since it was imported")
        entries = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
        relative = [entry or "an empty entry" for entry in entries if not os.path.isabs(entry)]
        if relative and cwd != self._folder:  # the interpreter has made it absolute
            raise Refused(f"{relative[0]} in PYTHONPATH is relative to another working directory")
        if not _is_path_safe():
            self._check_path(first_entry(argv, cwd))

    def take_over(self, argv: Sequence[str], cwd: str) -> None:
        """Have what the imports changed stand beside what the program begins with."""
        if not _is_path_safe():
            sys.path[sys.path.index(self._folder)] = first_entry(argv, cwd)
        for name, value in self._set.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def counts(self, name: str) -> bool:
        """Tell whether a variable may have changed what was imported."""
        if name in self._set:
            return True
        if name.startswith(_READ_LATER):
            return False
        families = _READ_AT_START + (_READ_TO_COMPUTE if self._computes else ())
        # A package's own variables begin with its name, as those of transformers and tqdm.
        prefix = name.partition("_")[0].lower()
        package = _OTHER_PREFIXES.get(prefix, prefix)
        return name.startswith(families) or (package in self._modules and package not in sys.stdlib_module_names)

    def _check_path(self, folder: str) -> None:
        """Compare the program's own folder, which comes first on its path, with the one that was there at the imports."""
        own = self._folder
        if own not in sys.path:
            raise Refused("an import has taken the program's folder off the path")
        if folder != own and sys.path.count(own) == 1:
            for name, module in self._modules.items():
                if _folder_of(module) == own:
                    raise Refused(f"{name} was imported from {own}, which is not on the program's path")
        with suppress(OSError):  # Python finds nothing in a folder that can't be listed
            for name in sorted({entry.partition(".")[0] for entry in os.listdir(folder)} & set(self._modules)):
                spec, file = PathFinder.find_spec(name, [folder]), getattr(self._modules[name], "__file__", None)
                # A folder without ``__init__.py`` has no origin, and comes after all others.
                if spec is not None and spec.origin is not None and spec.origin != file:
                    raise Refused(f"{spec.origin} would be imported instead of {file or name}")


def first_entry(argv: Sequence[str], cwd: str) -> str:
    """Return what Python puts first on the path for ``python -u SCRIPT`` and for ``python -u -m MODULE``."""
    return cwd if argv[2] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[2])))


def _is_path_safe() -> bool:
    return getattr(sys.flags, "safe_path", False)  # Python 3.11: no folder of the program's is on the path


def _folder_of(module: Any) -> str | None:
    """Return in which folder of the path a module, or its package, was found."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def _files_of_modules() -> Iterator[tuple[str, tuple[int, int]]]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (version := _version(file)) is not None:
            yield file, version


def _version(file: str) -> tuple[int, int] | None:
    try:
        now = os.stat(file)
    except OSError:  # torch has modules whose `__file__` names no file
        return None
    return now.st_mtime_ns, now.st_size


# --- the spare's side: its life ---------------------------------------------------------------------

# A function, and a tuple of its arguments.
Run = list[Any]


def main() -> Run:
    """Import, wait for a request, and return what it wants to run; ends the process where nobody asks any more."""
    options = json.loads(sys.argv[1])
    is_agent = options["kind"] == "agent"
    hooks = sys.modules.pop(_HOOKS, None)
    folder = os.getcwd()
    if not _is_path_safe():
        sys.path[0] = folder
    client = socket.socket(fileno=options["client"])
    _lower_priority(client)
    workers = SpareWorkers(options, client) if is_agent else None
    imports = Imports(options["modules"], folder, computes=not is_agent)
    if workers is not None:
        workers.start(has_imported=True)
    request, stdout, stderr = _receive(client)
    try:
        argv, env = request["argv"], request["env"]
        imports.check(argv, env, request["cwd"])
        os.chdir(request["cwd"])  # the script's path may be relative to it
        run = _program(argv) if workers is None else _agent(workers, request)
        _take_over(request, stdout, stderr)
        imports.take_over(argv, request["cwd"])
        if workers is not None:
            sys.argv[0] = sys.modules[AGENT].__file__ or ""  # as ``-m`` has it
        elif hooks is not None:
            hooks._begin_program()
    except BaseException as error:
        with suppress(OSError):
            client.sendall(" ".join(in_words(error).split()).encode(errors="replace") + b"\n")
        os._exit(1)
    client.sendall(b"\n")
    client.close()
    return run


def _receive(client: socket.socket) -> tuple[dict[str, Any], int, int]:
    header, files, _, _ = socket.recv_fds(client, _HEADER, 2)
    data, size = b"", int.from_bytes(header, "big")
    while header and len(data) < size and (part := client.recv(size - len(data))):
        data += part
    if not header or len(data) < size:
        os._exit(0)  # whoever has started this process needs it no more
    request: dict[str, Any] = json.loads(data)
    return request, files[0], files[1]


def _lower_priority(client: socket.socket) -> None:
    """Leave the cores to others, unless somebody waits already, or this process would have to keep the low priority."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if _may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
        if select.select([client], [], [], 0)[0]:
            os.setpriority(os.PRIO_PROCESS, 0, own)


def _may_raise_priority() -> bool:
    """Try it in a thread of its own: nice values are a thread's (Linux: setpriority(2)), and this one is gone after it."""
    done = []

    def lower_and_raise() -> None:
        with suppress(OSError):  # without CAP_SYS_NICE
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, min(own + 1, _LOWEST))
            os.setpriority(os.PRIO_PROCESS, 0, own)
            done.append(True)

    thread = threading.Thread(target=lower_and_raise, name="torchrun-priority")
    thread.start()
    thread.join()
    return bool(done)


def _take_over(request: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Be what a process is that was started as `request` says."""
    for thread in map(int, os.listdir("/proc/self/task")):  # libraries may have started some while the priority was low
        with suppress(ProcessLookupError):  # it has ended since
            if os.getpriority(os.PRIO_PROCESS, thread) != request["priority"]:
                os.setpriority(os.PRIO_PROCESS, thread, request["priority"])
    os.umask(request["umask"])
    argv, env = request["argv"], request["env"]
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[2:] if argv[2] != "-m" else ["-m", *argv[4:]]
    importlib.invalidate_caches()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    for own, given in ((1, stdout), (2, stderr)):
        if _is_kept(own):
            raise Refused("an import keeps a copy of stdout or stderr, which would go on writing to the spare's")
        written = os.pread(own, os.fstat(own).st_size, 0)
        while written:
            written = written[os.write(given, written) :]
        os.dup2(given, own)
        os.close(given)


def _is_kept(fd: int) -> bool:
    """Tell whether another descriptor of this process is of the same file."""
    for other in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own
            if other > 2 and os.path.sameopenfile(other, fd):
                return True
    return False


def _program(argv: Sequence[str]) -> Run:
    """Return what runs a script or a module, in a main module of its own, as the interpreter makes it (3.10 to 3.14)."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    if argv[2] == "-m":
        import runpy

        run: Run = [runpy._run_module_as_main, (argv[3], True)]  # type: ignore[attr-defined]  # C code calls it so, too
    else:
        file = os.path.join(os.getcwd(), argv[2])
        loader = SourceFileLoader("__main__", file)
        if not os.path.isfile(file):
            raise Refused(f"{file} is not a file")
        # What does not compile, as an archive or a syntax error, is left to a cold start.
        code = compile(loader.get_data(file), file, "exec", dont_inherit=True)
        main_module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
        run = [exec, (code, main_module.__dict__)]
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:  # `multiprocessing` sets it when it is imported
        sys.modules["__mp_main__"] = main_module
    return run


# --- the agent and its workers -----------------------------------------------------------------------


class SpareWorkers:
    """The spare workers of a spare agent."""

    def __init__(self, options: Mapping[str, Any], client: socket.socket) -> None:
        self._count = options["workers"]
        self._options = {"modules": options["worker_modules"]}
        self._news = options["news"]  # the guardian hears there of workers that were spares
        self._client = client
        self._spares: list[Spare] = []
        self._deadline = 0.0  # when all must have become workers
        self._fault = ""  # why some could not be started
        self._said: set[str] = set()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores >= 2 * (self._count + 1):
            self.start(has_imported=False)

    def start(self, has_imported: bool) -> None:
        """Start them, unless they are there, or a launch waits already: then torchrun is faster.

        Where cores are few they would take them from the agent, which a launch needs first: there they start when it
        has imported.
        """
        if has_imported and (self._spares or select.select([self._client], [], [], 0)[0]):
            return
        env = {**os.environ, _AGENT_PID: str(os.getpid())}
        try:
            for _ in range(self._count):
                self._spares.append(Spare("worker", self._options, env, None))
        except OSError as error:  # no more processes or files: torchrun starts its workers
            self._fault = in_words(error)

    def keep(self, count: int) -> None:
        """End all but so many."""
        while len(self._spares) > count:
            self._spares.pop().end()

    def serve(self, more_env: Mapping[str, str], umask: int) -> None:
        """Have torchrun use them for its workers, each with `more_env` besides."""
        module = importlib.import_module(POPEN_OF_WORKERS)
        start = module.Popen  # an AttributeError means that this torch starts its workers in another way

        def popen(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **options: Any) -> Any:
            own_env = {**env, **more_env}
            request = {"argv": list(args), "env": own_env, "cwd": os.getcwd(), "umask": umask}
            worker = self._one(request, stdout, stderr)
            return worker or start(args=args, env=own_env, stdout=stdout, stderr=stderr, **options)

        module.Popen = popen  # type: ignore[attr-defined]
        self._deadline = time.monotonic() + ANSWER_S

    def _one(self, request: Mapping[str, Any], stdout: Any, stderr: Any) -> Any:
        """Return a spare that has become a worker; None if none can."""
        env = request["env"]
        while self._spares:
            try:
                worker = self._spares.pop(0).become(request, stdout.fileno(), stderr.fileno(), self._deadline)
            except Exception as error:
                self._say(in_words(error))
            else:
                with suppress(OSError):  # the guardian is gone, and ends this process
                    os.write(self._news, f"{worker.pid} {env['RANK']} {env['LOCAL_RANK']}\n".encode())
                return worker
        if self._fault or not self._said:
            self._say(self._fault or "no spare was ready")
        return None

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            sys.stderr.write(f"A worker starts cold: {why}.\n")


def _agent(workers: SpareWorkers, request: dict[str, Any]) -> Run:
    """Return what runs torchrun."""
    module = importlib.import_module(AGENT)
    workers.keep(request["workers"])
    atexit.register(workers.keep, 0)  # those that torchrun has not asked for
    if request["workers"]:
        workers.serve(request["worker_env"], request["umask"])
    if request["env"].get(_AGENT_PID) == "":  # the first Python of a launch is its agent; see `worker_hooks`
        request["env"][_AGENT_PID] = str(os.getpid())
    return [module.main, ()]


def _hide_first_frame() -> None:
    """Have the frame that is ours left out of the traceback that ends this process."""
    show = sys.excepthook

    def shorter(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        error = error.with_traceback(trace and trace.tb_next)
        try:
            show(kind, error, error.__traceback__)
        except Exception as second:  # the same words as the interpreter's
            sys.stderr.write("Error in sys.excepthook:\n")
            second.__traceback__ = second.__traceback__ and second.__traceback__.tb_next
            sys.__excepthook__(type(second), second, second.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, error, error.__traceback__)

    sys.excepthook = shorter


if __name__ == "__main__":
    _run = main()
    try:
        # From here, so that one frame of ours only is below the program's; and nothing of ours holds its module.
        _run[0](*_run.pop())
    except SystemExit:
        raise
    except BaseException:
        _hide_first_frame()
        raise
