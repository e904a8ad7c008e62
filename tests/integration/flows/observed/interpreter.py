"""What a program sees of its interpreter."""

import sys

MODULES = sorted(sys.modules)  # before this module imports any

import atexit  # noqa: E402
import builtins  # noqa: E402
import codecs  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import hashlib  # noqa: E402
import locale  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import site  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import tracemalloc  # noqa: E402
import warnings  # noqa: E402


def of_main() -> dict[str, object]:
    """The program as a module, and what stands below it on the stack."""
    main, frame, below = sys.modules["__main__"], sys._getframe(), []
    while frame is not None:
        below.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        frame = frame.f_back
    spec = main.__spec__
    return {
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "name": main.__name__,
        "file": getattr(main, "__file__", None),
        "package": main.__package__,
        "cached": getattr(main, "__cached__", None),
        "doc": main.__doc__,
        "builtins": type(main.__builtins__).__name__,
        "loader": [type(main.__loader__).__name__, getattr(main.__loader__, "name", None)],
        "loader path": getattr(main.__loader__, "path", None),
        "spec": spec and [spec.name, spec.origin, spec.parent, spec.has_location, type(spec.loader).__name__],
        "stack": below,
    }


def of_sys() -> dict[str, object]:
    """What is in `sys`, but for the standard streams."""
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_"))}
    return {
        "flags": {name: value for name, value in flags.items() if not callable(value)},
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "path_hooks": [getattr(hook, "__qualname__", repr(type(hook))) for hook in sys.path_hooks],
        "meta_path": [getattr(finder, "__qualname__", type(finder).__qualname__) for finder in sys.meta_path],
        "executable": sys.executable,
        "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.pycache_prefix],
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "dont_write_bytecode": sys.dont_write_bytecode,
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "trace": [sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing()],
        "hooks": [f"{hook.__module__}.{hook.__qualname__}" for hook in _hooks()],
        "last": [
            name for name in ("last_type", "last_value", "last_traceback", "last_exc", "ps1") if hasattr(sys, name)
        ],
        "handled": sys.exc_info(),
        "limits": [sys.get_int_max_str_digits(), getattr(sys, "tracebacklimit", None)],
        "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding()],
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    }


def _hooks():
    return (
        sys.excepthook,
        sys.__excepthook__,
        sys.displayhook,
        sys.unraisablehook,
        sys.breakpointhook,
        threading.excepthook,
    )


def of_streams() -> dict[str, object]:
    """The standard streams, whose settings come from the environment at the interpreter's begin."""
    seen = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        seen[name] = [stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines, stream.isatty()]
        seen[f"{name} buffers"] = [stream.line_buffering, stream.write_through, type(stream.buffer).__name__]
        seen[f"{name} itself"] = [stream is getattr(sys, f"__{name}__"), stream.fileno(), stream.closed]
    return seen


def of_settings() -> dict[str, object]:
    """What libraries of the standard library keep for the whole process."""
    return {
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)],
        "gc frozen": gc.get_freeze_count(),
        "warnings": warning_filters(),
        "showwarning": [warnings.showwarning.__module__, warnings.formatwarning.__module__],
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), locale.getencoding()]
        if hasattr(locale, "getencoding")
        else [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "time zone": [time.tzname, time.timezone, time.daylight, time.strftime("%Z%z", time.localtime(0))],
        "temporary folder": [tempfile.tempdir, tempfile.gettempdir()],
        "home": [os.path.expanduser("~"), site.ENABLE_USER_SITE, site.USER_BASE, site.USER_SITE],
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "main for multiprocessing": sys.modules["__mp_main__"] is sys.modules["__main__"],
        "multiprocessing": [
            multiprocessing.current_process().name,
            multiprocessing.parent_process(),
            multiprocessing.active_children(),
        ],
        "root logger": [
            logging.root.level,
            [repr(handler) for handler in logging.root.handlers],
            logging.root.disabled,
        ],
        "logging": [
            logging.raiseExceptions,
            logging.root.manager.disable,
            logging.getLogRecordFactory().__qualname__,
            logging.getLoggerClass().__qualname__,
            logging.lastResort and logging.lastResort.level,
        ],
        "logging began with the process": time.time() - _logging_began() <= of_process_s() + 0.1,
        "builtins": sorted(set(vars(builtins)) - {"_"}),
        "popen": [subprocess.Popen.__module__, subprocess.Popen.__init__.__code__.co_filename, subprocess._active],
        "fork": [os.fork.__module__, type(os.fork).__name__, type(os._exit).__name__, type(os.execve).__name__],
        "codecs": codecs.lookup_error("strict").__name__,
        "floats": [5e-324 * 1.0, 0.1 + 0.2, float.__getformat__("double")],
    }


def _logging_began() -> float:
    began = logging._startTime
    return began / 1e9 if isinstance(began, int) else began  # Python 3.13


def of_process_s() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def warning_filters() -> list[str]:
    """Return them as texts; those of the interpreter itself have texts where others have patterns."""
    entries = [[getattr(part, "pattern", part) for part in entry] for entry in warnings.filters]
    return [f"{action} {text} {kind.__name__} {module} {line}" for action, text, kind, module, line in entries]


def of_signals() -> dict[str, object]:
    """What Python does at each signal."""
    handlers = {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}
    shown = {
        f"{number:d}": getattr(each, "name", None) or getattr(each, "__name__", each)
        for number, each in handlers.items()
    }
    wakeup = signal.set_wakeup_fd(-1)
    return {"handlers": shown, "wakeup": wakeup, "timer": [signal.getitimer(each) for each in (0, 1, 2)]}


def of_threads() -> dict[str, object]:
    """Which threads Python knows."""
    main = threading.main_thread()
    return {
        "all": [f"{thread.name} {type(thread).__name__} {thread.daemon}" for thread in threading.enumerate()],
        "main": [
            main is threading.current_thread(),
            main.ident == threading.get_ident(),
            main.native_id == os.getpid(),
        ],
        "stack size": threading.stack_size(),
        "next": threading.Thread().name,
    }


def of_randomness() -> dict[str, object]:
    """What is drawn, and must not be the same where it is not today."""
    return {
        "random": random.random(),
        "state of random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "a generator of random's": random.Random().random(),
        "urandom": os.urandom(8).hex(),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "temporary name": tempfile.mktemp(),
        "hash of a text": hash("a text"),
    }


def everything() -> dict[str, object]:
    """All of it but what is random, flat."""
    parts = {
        "main": of_main,
        "sys": of_sys,
        "streams": of_streams,
        "settings": of_settings,
        "signals": of_signals,
        "threads": of_threads,
    }
    seen = {f"{part}: {name}": value for part, look in parts.items() for name, value in look().items()}
    return {"modules": MODULES, "exit handlers": atexit._ncallbacks(), **seen}
