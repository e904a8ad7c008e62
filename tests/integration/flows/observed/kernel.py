"""What a program sees of its process, as Linux tells it."""

import ctypes
import fcntl
import os
import resource
import time
from pathlib import Path

_SAME = (
    "Umask",
    "TracerPid",
    "Uid",
    "Gid",
    "Groups",
    "Threads",
    "SigPnd",
    "ShdPnd",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Speculation_Store_Bypass",
    "THP_enabled",
    "Cpus_allowed_list",
    "Mems_allowed_list",
)
_FILES = ("comm", "oom_score_adj", "coredump_filter", "timerslack_ns", "cgroup", "personality", "loginuid")
# <linux/prctl.h>
_PRCTL = {
    "parent death signal": 2,
    "dumpable": 3,
    "keep capabilities": 7,
    "timer slack": 30,
    "subreaper": 37,
    "no THP": 42,
}
_BY_REFERENCE = (2, 37)
_NEW_IN_EACH_LAUNCH = ("MASTER_PORT", "TORCHRUN_AGENT_PID")
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def of_status() -> dict[str, object]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: lines[name].split() for name in _SAME if name in lines}


def of_files() -> dict[str, object]:
    """Which files are open, how, and where in them the process is."""
    seen = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            target, flags = os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # that of the list itself
            continue
        at = os.lseek(fd, 0, os.SEEK_CUR) if os.path.isfile(target) else None
        seen[str(fd)] = [target, oct(flags), fcntl.fcntl(fd, fcntl.F_GETFD), os.get_inheritable(fd), at]
    return seen


def of_limits() -> dict[str, object]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def of_control() -> dict[str, object]:
    """What `prctl` and its kind know."""
    libc, seen = ctypes.CDLL(None), {}
    for name, option in _PRCTL.items():
        value = ctypes.c_int(-1)
        said = libc.prctl(option, ctypes.byref(value) if option in _BY_REFERENCE else 0, 0, 0, 0)
        seen[name] = value.value if option in _BY_REFERENCE else said
    io = _IOPRIO_GET.get(os.uname().machine)
    return {**seen, "io priority": libc.syscall(io, 1, 0) if io else None}


def of_scheduling() -> dict[str, object]:
    return {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "affinity": sorted(os.sched_getaffinity(0)),
        "autogroup": Path("/proc/self/autogroup").read_text().split()[1:]
        if os.path.exists("/proc/self/autogroup")
        else None,
    }


def of_family() -> dict[str, object]:
    """How the process stands to others."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "is the agent's child": str(os.getppid()) == os.environ.get("TORCHRUN_AGENT_PID"),
        "the agent was started warm": b"warm.guardian" in _command_line(_parent_of(os.getppid())),
        "children": children.read_text().split() if children.exists() else None,
        "has a terminal": _has_terminal(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))},
        "root": os.readlink("/proc/self/root"),
        "exe": os.readlink("/proc/self/exe"),
    }


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def of_usage() -> dict[str, object]:
    """What is counted from a process's begin."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "children": [children.ru_utime, children.ru_stime],
        "began before its clock": time.process_time() <= time.clock_gettime(time.CLOCK_BOOTTIME) - _began_s() + 0.1,
    }


def _began_s() -> float:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def of_environment() -> dict[str, object]:
    """The variables as Python, C and a child have them."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    as_c = {name: libc.getenv(name) for name in map(os.fsencode, os.environ)}
    variables = {name: value for name, value in os.environ.items() if name not in _NEW_IN_EACH_LAUNCH}
    return {
        "names": sorted(os.environ),
        **{f"variable {name}": value for name, value in variables.items()},
        "in bytes": sorted(os.fsdecode(name) for name in os.environb.keys() ^ set(map(os.fsencode, os.environ))),
        "in C": [
            name.decode(errors="replace")
            for name, value in as_c.items()
            if value != os.fsencode(os.environ[os.fsdecode(name)])
        ],
        "working directory": [os.getcwd(), os.environ.get("PWD")],
    }


def everything() -> dict[str, object]:
    """All of it, flat."""
    parts = {
        "status": of_status,
        "open files": of_files,
        "limits": of_limits,
        "control": of_control,
        "scheduling": of_scheduling,
        "family": of_family,
        "usage": of_usage,
        "environment": of_environment,
    }
    seen = {f"{part}: {name}": value for part, look in parts.items() for name, value in look().items()}
    files = {
        f"file {name}": Path(f"/proc/self/{name}").read_text()
        for name in _FILES
        if os.path.exists(f"/proc/self/{name}")
    }
    return {
        **seen,
        **files,
        "command line": Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0"),
        "initial environment": _initial_environment(),
    }


def _initial_environment() -> bool:
    """Whether the kernel still knows the environment with which the program began."""
    return b"\0RANK=" in Path("/proc/self/environ").read_bytes()
