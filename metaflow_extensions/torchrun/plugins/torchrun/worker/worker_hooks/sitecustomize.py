"""Records the exception that ends a worker, and lets a worker be asked for its stack and its collectives.

It also records at the worker's end whether it has trained by itself.

Python imports the first module of this name on its path before it runs a script; `supervisor.command` puts this folder
first. Every Python process of a launch loads it, so it imports nothing that costs anything. It acts only in a worker,
which is a child of the agent. What a worker starts has inherited the variables, but is no worker.
`supervisor.workers` reads ``exception.json`` and ``trained-alone``.
"""

import os
import sys

TYPE_CHECKING = False  # typing is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

_SPARE = "TORCHRUN_SPARE"
_RECORD = "exception.json"
_ALONE = "trained-alone"
_OTHER_WAYS = ("horovod", "mpi4py")  # for ranks to exchange gradients, without a process group of torch's
_SCRIPTS = os.path.dirname(os.path.dirname(__file__))
_OURS = (os.path.join(_SCRIPTS, "function_worker.py"), os.path.join(_SCRIPTS, "spare.py"))
_MAX_CHARS = 4096  # characters of a message, and of each frame or message in a traceback
_MAX_TRACEBACK_CHARS = 32 * 1024


def _is_worker() -> bool:
    return os.environ.get("TORCHRUN_AGENT_PID") == str(os.getppid())


# --- what ended it ----------------------------------------------------------------------------


def _record_the_end() -> None:
    # Not torchelastic's own error file: it is left to the user's @record, and torchrun prints what it holds once more.
    import _thread
    import atexit

    getpid, get_ident = os.getpid, _thread.get_ident
    here = getpid(), get_ident()
    show = sys.__excepthook__

    def look(error: "BaseException | None", trace: "TracebackType | None") -> "tuple[TracebackType | None, str]":
        """Record `error` if it ends this worker, not a fork of it or a thread.

        Return the traceback to show, and the rank that shows it.
        """
        first = ""
        try:
            if error is not None and _nobody_catches(error):
                trace = _from_users_line(error, trace)
                own = (getpid(), get_ident()) == here
                path = _folder and os.path.join(_folder, _RECORD)
                # KeyboardInterrupt is how Python dies of SIGINT, unless its hook has compiled anything (3.10 to 3.13).
                if own and path and type(error) is not KeyboardInterrupt and not os.path.exists(path):
                    _record(path, error, trace)
                    first = _first_there(error, trace)
        except BaseException:  # noqa: S110 - no room, no memory, a __str__ of the user's
            pass
        return trace, first

    def excepthook(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
        trace, first = look(error, trace)
        if first:
            _in_one_piece(lambda: sys.stderr.write(f"{_name(error)} (rank {first} has the traceback)\n"))
        else:
            _in_one_piece(lambda: show(kind, error, trace))

    # Both, since a hook of the user's own may call either. If it calls none, there is the end: what is registered
    # first runs last.
    sys.excepthook = sys.__excepthook__ = excepthook
    atexit.register(lambda: look(getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)))


def _first_there(error: BaseException, trace: "TracebackType | None") -> str:
    """Return the rank of this node that was the first to raise such an error in this line; empty if it is this one.

    Where not all ranks are shown, each tells its own: the first one's lines may be hidden.
    """
    if "TORCHRUN_HIDES" in os.environ:
        return ""
    import traceback
    import zlib

    where = zlib.crc32(f"{type(error)}{traceback.format_tb(trace)}".encode(errors="replace"))
    path = os.path.join(os.path.dirname(_folder), f"raised-{where}")
    try:
        os.symlink(os.environ["RANK"], path)
    except FileExistsError:
        return os.readlink(path)
    return ""


def _in_one_piece(show: "Callable[[], object]") -> None:
    """Write everything that `show` prints to stderr at once, so that no other line comes between.

    Python writes a traceback in hundreds of pieces where stderr has no buffer. Torch does the same once there is a
    process group (`_distributed_excepthook`, torch 2.13).
    """
    import io

    usual, sys.stderr = sys.stderr, io.StringIO()
    try:
        show()
    finally:
        text, sys.stderr = sys.stderr.getvalue(), usual
        if usual is not None:
            usual.write(text)
            usual.flush()


def _nobody_catches(error: BaseException) -> bool:
    """Return whether Python prints `error` because the program is over.

    Before that it sets ``sys.last_value``. Others set it, too (pytest, pdb, `code`), or call the hook by hand; but of
    what they have caught, the first frame was called by another.
    """
    trace = getattr(sys, "last_traceback", None)
    return getattr(sys, "last_value", None) is error and (trace is None or trace.tb_frame.f_back is None)


def _from_users_line(error: BaseException, trace: "TracebackType | None") -> "TracebackType | None":
    """Take the frames before the user's first line off `error`, its causes and `trace`."""
    seen = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        BaseException.with_traceback(link, _without_ours(link.__traceback__))
        link = link.__context__ if link.__cause__ is None else link.__cause__
    return _without_ours(trace)


def _without_ours(trace: "TracebackType | None") -> "TracebackType | None":
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename not in _OURS and frame.f_globals.get("__name__") != "runpy":
            break
        trace = trace.tb_next
    return trace


def _record(path: str, error: BaseException, trace: "TracebackType | None") -> None:
    import time

    at = time.monotonic()  # the same clock in all processes of the machine
    import json

    with open(path + ".part", "w", encoding="ascii") as file:
        name = _name(error)
        record = {"exception": name, "traceback": _traceback(error, trace), "at": at, "advice": _advice(name)}
        json.dump(record, file)
    os.replace(path + ".part", path)


def _name(error: BaseException) -> str:
    """Return type and message, as Python prints them."""
    kind = type(error)
    module = kind.__module__ if isinstance(kind.__module__, str) else "<unknown>"
    name = kind.__qualname__ if module in ("__main__", "builtins") else module + "." + kind.__qualname__
    try:
        text = str(error)
    except BaseException:
        text = "<exception str() failed>"
    return name + ": " + _shortened(text, _MAX_CHARS) if text else name


def _advice(name: str) -> str:
    """Return what to change after an exception; empty where nothing is known."""
    try:
        import runpy

        return str(runpy.run_path(os.path.join(_SCRIPTS, "remedies.py"))["remedy"](name))
    except BaseException:  # then there is the name
        return ""


def _traceback(error: BaseException, trace: "TracebackType | None") -> str:
    # Twice: a signal's handler may raise meanwhile, as torch's does when a worker of a DataLoader is killed.
    for _ in range(2):
        try:
            import traceback

            parts = traceback.format_exception(type(error), error, trace)
            return _shortened("".join(_shortened(part, _MAX_CHARS) for part in parts), _MAX_TRACEBACK_CHARS)
        except BaseException:  # noqa: S112 - then there is the name
            continue
    return ""


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# --- whether it has trained by itself -----------------------------------------------------------


def _tell_of_training_alone() -> None:
    """Write a file at the end if gradients were computed here without any process group.

    Then this rank has exchanged none with the others, which is rarely meant. If anything about this can't be found out,
    no file is written.
    """
    import atexit

    getpid = os.getpid
    own = getpid()

    def look() -> None:
        try:
            path = _folder and os.path.join(_folder, _ALONE)
            is_one_of_many = os.environ.get("WORLD_SIZE") != "1" and getpid() == own
            if path and is_one_of_many and _has_trained() and not _has_exchanged():
                open(path, "w").close()
        except BaseException:  # noqa: S110 - another torch, a full disk
            pass

    atexit.register(look)


def _has_trained() -> bool:
    """Return whether this thread has recorded an operation for a gradient; a program that only predicts has none, as a rule.

    Torch numbers these operations in each thread (2.1 to 2.14). It is no proof that torch is imported: a worker that was
    a spare has imported it in any case.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.autograd._get_sequence_nr() > 0


def _has_exchanged() -> bool:
    """Return whether this process has or had a default process group, or another way to reach the other ranks.

    Torch sets two private names when it makes a group, and keeps them when the group is destroyed (read in 2.13). If
    another torch lacks one of them, this raises, which means: unknown.
    """
    if any(name in sys.modules for name in _OTHER_WAYS):
        return True
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    group = sys.modules["torch.distributed.distributed_c10d"]
    if group._backend == "undefined" and _accelerate_is_alone():
        return False
    return group._backend is not None or group._default_pg_init_method is not None or distributed.is_initialized()


def _accelerate_is_alone() -> bool:
    """Return whether Accelerate, which Hugging Face's Trainer uses, too, believes that this process is the only one.

    Without a GPU it makes a group without naming a backend, and then does not use it (1.15).
    """
    state = sys.modules.get("accelerate.state")
    return state is not None and state.PartialState._shared_state.get("num_processes") == 1


# --- what lets it be asked for its stack --------------------------------------------------------


def _let_be_asked() -> None:
    """Write the Python stack of the main thread at a signal, even in a hang; `machine.stacks` sends it and reads that."""
    import faulthandler  # built into the interpreter

    number = int(os.environ["TORCHRUN_STACKS_SIGNAL"])
    # It must be open beforehand: the handler runs outside of the interpreter, which may be stuck. Without a name it
    # leaves nothing behind, however the worker ends; `stacks` finds it among the worker's open files.
    path = os.path.join(os.environ["TORCHRUN_STACKS_FOLDER"], "torchrun-stacks-" + str(os.getpid()))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    # Far above the numbers that a program's own files get: the kernel gives the lowest free one, and a script may expect
    # it. A program that closes all files and opens others does not meet this number soon either.
    if not os.path.exists("/proc/self/fd/200"):
        try:
            low, file = file, os.dup2(file, 200, inheritable=False)
            os.close(low)
        except OSError:  # over the limit of open files
            pass
    # The stack of the thread that gets the signal, which is the main one. All threads would be a risk: the handler reads
    # frames that their threads change meanwhile, and about one time in 3 000 that ends the process (CPython issue
    # 116008, seen with 3.11).
    faulthandler.register(number, file=file, all_threads=False, chain=False)


# --- what lets it be asked for its collectives --------------------------------------------------

_GROUPS = "torch.distributed.distributed_c10d"


class _AfterImport:
    """A finder that finds nothing; at the first import after that of torch's process groups, it has them recorded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        module: Any = sys.modules.get(_GROUPS)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _arrange(lambda: sys.meta_path.remove(self), lambda: _record_groups(module))


def _record_groups(module: object) -> None:
    path = os.path.join(_SCRIPTS, "process_groups.py")
    ours: dict[str, Any] = {"__name__": "torchrun_process_groups"}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), ours)  # noqa: S102 - a file of ours, which no import may find
    ours["watch"](module, _folder)


def _let_tell_of_groups() -> None:
    if os.environ.get("TORCHRUN_RECORDERS") == "1":  # there is room for the threads of torch's server
        sys.meta_path.insert(0, finder := _AfterImport())
        finder.find_spec("")  # a spare has imported torch


# --- beginning --------------------------------------------------------------------------------


_folder = ""  # this worker's own, where torchrun has its logs
_kind = os.environ.pop(_SPARE, None)  # of this process, while it is a spare: "agent" or "worker"


def begin_program() -> None:
    """Do what needs the environment of a worker; `worker/spare.py` calls this when it has got that."""
    global _folder
    if _is_worker():
        _folder = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        _arrange(_let_be_asked, _let_tell_of_groups)


def _arrange(*what: "Callable[[], None]") -> None:
    for each in what:
        try:  # noqa: SIM105 - as above
            each()
        except Exception:  # noqa: S110 - a worker must start, whatever becomes of this
            pass


def _step_aside() -> None:
    """Import the ``sitecustomize`` that Python would have found without ours; `site` handles its errors or its absence."""
    own = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != own]
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")


if _kind == "worker" or _is_worker():
    _arrange(_record_the_end, _tell_of_training_alone)  # before all imports, so that their exit handlers run first
if _kind:
    sys.modules["torchrun_worker_hooks"] = sys.modules[__name__]  # where `worker/spare.py` finds it again
else:
    begin_program()
_step_aside()
