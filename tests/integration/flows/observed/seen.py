"""What a program sees of itself, flat and in words that do not change from launch to launch."""

import sys

MODULES = sorted(sys.modules)  # before this module imports any

import atexit  # noqa: E402
import ctypes  # noqa: E402
import fcntl  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402

LAUNCH = "-".join(os.environ.get("TORCHELASTIC_RUN_ID", "").split("-")[:2])  # without the gang's name
_STATUS = ("Umask", "Uid", "Gid", "Groups", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "CapEff")
_OTHER_IN_EACH_LAUNCH = ("MASTER_PORT", "TORCHRUN_AGENT_PID")


def of_main() -> dict[str, object]:
    """The program as a module, and what stands below it on the stack."""
    main, frame, below = sys.modules["__main__"], sys._getframe(), []
    while frame is not None:
        below.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        frame = frame.f_back
    spec, loader = main.__spec__, main.__loader__
    return {
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "file": [
            getattr(main, name, None) for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__")
        ],
        "loader": [type(loader).__name__, getattr(loader, "name", None), getattr(loader, "path", None)],
        "spec": spec and [spec.name, spec.origin, spec.parent, type(spec.loader).__name__],
        "for multiprocessing": sys.modules.get("__mp_main__", main) is main,
        "stack": below,
    }


def of_interpreter() -> dict[str, object]:
    """What is set for the whole process; some of it comes from the environment at the interpreter's begin."""
    filters = [[getattr(part, "pattern", part) for part in entry] for entry in warnings.filters]
    streams = [sys.stdin, sys.stdout, sys.stderr]
    hooks = [sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, os.fork]
    return {
        "flags": repr(sys.flags),
        "argv": [sys.argv, sys.orig_argv, sys.executable],
        "path": sys.path,
        "hooks": [f"{hook.__module__}.{hook.__qualname__}" for hook in hooks],
        "limits": [sys.getrecursionlimit(), sys.gettrace(), threading.stack_size(), gc.get_threshold()],
        "streams": [[each.name, each.encoding, each.errors, each.write_through, each.fileno()] for each in streams],
        "warnings": [f"{act} {text} {kind.__name__} {module} {line}" for act, text, kind, module, line in filters],
        "logging": [logging.root.level, list(map(repr, logging.root.handlers))],
        "temporary folder": [tempfile.tempdir, tempfile.gettempdir(), os.path.expanduser("~")],
        "threads": [f"{thread.name} {thread.daemon}" for thread in threading.enumerate()],
        "handlers": {f"{number:d}": repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
        "process": [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True)],
    }


def of_process() -> dict[str, object]:
    """What Linux tells."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        **{f"status {name}": status[name].split() for name in _STATUS},
        "limits": [resource.getrlimit(getattr(resource, name)) for name in limits],
        "nice": [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
        "family": [os.getsid(0) == os.getpid(), str(os.getppid()) == os.environ.get("TORCHRUN_AGENT_PID")],
        "the agent was started warm": b"/worker/spare.py" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes(),
        "working directory": [os.getcwd(), os.environ.get("PWD")],
        "command line": Path("/proc/self/cmdline").read_text(errors="replace").split("\0"),
        "files": open_files(),
    }


def open_files() -> dict[str, object]:
    """Which files are open, how, and where in them the process is."""
    seen = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd == 200:  # ours, far above those of a program; its name has the pid (`worker_hooks`)
            continue
        try:
            target, flags = os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # that of the list itself
            continue
        at = os.lseek(fd, 0, os.SEEK_CUR) if os.path.isfile(target) else None
        seen[str(fd)] = [target, oct(flags), os.get_inheritable(fd), at]
    return seen


def of_environment() -> dict[str, object]:
    """The variables as Python and C have them."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    others = [name for name in os.environb if libc.getenv(name) != os.environb[name]]
    seen = {name: value for name, value in os.environ.items() if name not in _OTHER_IN_EACH_LAUNCH}
    return {**seen, "names": sorted(os.environ), "not in C": list(map(os.fsdecode, others))}


def everything() -> dict[str, object]:
    parts = {"main": of_main, "python": of_interpreter, "process": of_process, "environment": of_environment}
    seen = {f"{part}: {name}": value for part, look in parts.items() for name, value in look().items()}
    return {"modules": MODULES, "exit handlers": atexit._ncallbacks(), **seen}


def drawn() -> list[object]:
    """What is random."""
    return [random.random(), os.urandom(8).hex(), tempfile.mktemp(), hash("a text")]


def note(**seen: object) -> None:
    """Leave a file of this rank."""
    worker = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    text = re.sub(r"torchrun-call-\w+|0x[0-9a-f]{8,}", "<one of many>", json.dumps(seen, default=repr))
    pipes = os.path.dirname(os.path.realpath("/proc/self/fd/1"))
    words = {worker: "<worker's folder>", os.path.dirname(os.path.dirname(os.path.dirname(worker))): "<folder>"}
    words[pipes] = "<pipes>"
    for name, word in {**words, os.environ["TORCHELASTIC_RUN_ID"]: "<run id>"}.items():
        text = text.replace(json.dumps(name)[1:-1], word)
    path = Path(os.environ["GANG_OUT"], f"seen-{LAUNCH}-{os.environ['RANK']}.json")
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)
