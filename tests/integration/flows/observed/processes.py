"""Starts processes in every way, and notes what comes of it."""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import shared_memory

import interpreter
import kernel
from note import note


@dataclass
class Thing:
    """A class of the program's own, which is pickled by its name."""

    value: int

    def doubled(self) -> "Thing":
        return Thing(2 * self.value)


class OwnError(Exception):
    """An exception of the program's own."""


def look(thing: Thing) -> tuple[Thing, dict[str, object]]:
    """What a child sees, with a class of its parent's and back."""
    main = sys.modules["__main__"]
    seen = {
        "its main": [main.__name__, getattr(main, "__file__", None), __name__, type(thing) is Thing],
        "arguments": sys.argv,
        "path": sys.path,
        "names": [
            multiprocessing.current_process().name,
            multiprocessing.current_process().daemon,
            multiprocessing.parent_process().name,
        ],
        **{f"status {name}": value for name, value in kernel.of_status().items() if name != "Threads"},
        "limits": kernel.of_limits(),
        "nice": kernel.of_scheduling(),
        "environment": sorted(os.environ),
        "working directory": os.getcwd(),
        "handlers": interpreter.of_signals()["handlers"],
        "hooks": interpreter.of_sys()["hooks"],
        "streams": interpreter.of_streams()["stdout"],
    }
    return thing.doubled(), seen


def fail(_: int) -> None:
    raise OwnError("in a child")


def leave() -> None:
    print("child leaves", flush=True)
    sys.exit(3)


def fill(queue: "multiprocessing.Queue[Thing]", name: str) -> None:
    memory = shared_memory.SharedMemory(name)
    memory.buf[0] = 7
    memory.close()
    queue.put(Thing(5))


def by(method: str) -> dict[str, object]:
    """What comes of one start method."""
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        thing, seen = pool.apply(look, (Thing(21),))
        try:
            pool.map(fail, [1])
        except OwnError as error:
            failure = [type(error) is OwnError, str(error), type(error.__cause__).__name__]
    child = context.Process(target=leave)
    child.start()
    child.join()
    memory, queue = shared_memory.SharedMemory(create=True, size=16), context.Queue()
    other = context.Process(target=fill, args=(queue, memory.name))
    other.start()
    got = queue.get(timeout=60)
    other.join()
    shared = memory.buf[0]
    memory.close()
    memory.unlink()
    codes = [child.exitcode, other.exitcode]
    return {
        **seen,
        "thing": [type(thing) is Thing, thing.value, got.value],
        "failure": failure,
        "ends": codes,
        "shared": shared,
    }


def by_program() -> dict[str, object]:
    """What a program that a worker starts sees."""
    code = "import os, sys; print(sorted(os.environ), sys.argv, sys.flags, sys.excepthook, sys.path)"
    python = subprocess.run([sys.executable, "-c", code, "an argument"], capture_output=True, text=True, check=True)
    status = subprocess.run(
        ["cat", "/proc/self/status"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    masks = [line.split() for line in status if line.startswith(("Sig", "Shd", "Umask", "Cpus_allowed:"))]
    masks = [line for line in masks if line[0] != "SigQ:"]
    files = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout.split()
    return {"python": python.stdout, "stderr": python.stderr, "masks": masks, "files": files}


def pools() -> dict[str, object]:
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        things = list(executor.map(Thing.doubled, [Thing(1), Thing(2)]))
    with multiprocessing.Manager() as manager:
        shared = manager.dict(thing=Thing(8))
        managed = shared["thing"].value
    return {"executor": [thing.value for thing in things], "manager": managed}


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # children have it from their parent
    seen = {
        f"{method}: {name}": value for method in ("fork", "spawn", "forkserver") for name, value in by(method).items()
    }
    kept = pickle.dumps(Thing(3))
    note(
        "processes",
        same={
            **seen,
            **pools(),
            **by_program(),
            "pickled": kept.hex(),
            "unpickled": [type(pickle.loads(kept)) is Thing, multiprocessing.active_children()],
        },
    )


if __name__ == "__main__":
    main()
