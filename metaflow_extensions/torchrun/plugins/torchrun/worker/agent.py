"""The agent of a node: torchrun, which tells of its workers; these write to the pipes that this node reads.

Usage: ``agent.py PIPES SIGNAL TORCHRUN_ARGUMENT...``. It runs as a program, without our package on its path. The working
directory is not on its path either: it may have files named like modules of Python or torch. Workers find modules as
under torchrun.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import Any

SUPERVISOR = os.getppid()
STORE_S, _LOOK_S, _MAX_LOOK_S = 1.0, 0.005, 0.05
SILENCE_S = 20.0  # so long is a store tried of which nothing comes back; the kernel sends a lost SYN again, five times


def halt(number: int, _: object) -> None:
    """Act on workers no more, but go on serving torch's store to those that save: it has threads of its own.

    The supervisor sends the signal before it stops the workers itself. Only if it is killed does the agent act
    again: the kernel sends SIGTERM then, and torchrun stops its workers.
    """
    if News.is_telling:
        News.halted_by = number
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # so the supervisor sees that this process waits
    while os.getppid() == SUPERVISOR:
        try:
            signal.pause()
        except BaseException:  # torchrun's handlers of SIGTERM and others raise
            if os.getppid() != SUPERVISOR:
                raise


def change_workers(folder: str, restarts: str, metrics: str) -> None:
    """Have torchrun give each worker the pipes of its local rank for stdout and stderr, and its variables.

    `LogsSpecs` and `LogsDest` are torch's public interface for this (torch 2.3 to 2.14), but to name another class on
    the command line needs an installed entry point, and Metaflow ships our code into pods without those. `reify` also
    sets variables of the workers. `restarts` is "1/3" for restart 1 of at most 3; torchrun itself counts those of
    this one agent, which are always 0. A worker appends what it reports to its file in `metrics`, where
    the page of its calls of `stopping` is, too.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    find = DefaultLogsSpecs.reify

    def reify(self: DefaultLogsSpecs, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = find(self, envs)
        for local_rank, env in envs.items():
            found.stdouts[local_rank] = os.path.join(folder, f"{local_rank}.stdout")
            found.stderrs[local_rank] = os.path.join(folder, f"{local_rank}.stderr")
            if "TORCHRUN_METRICS" not in os.environ:  # what the user has set stays
                env["TORCHRUN_METRICS"] = os.path.join(metrics, f"{local_rank}.jsonl")
            env["TORCHRUN_CALLS"] = os.path.join(metrics, f"{local_rank}.calls")
            if restarts:
                env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"] = restarts.split("/")
        return found

    DefaultLogsSpecs.reify = reify


class News:
    """Writes to the pipe `path` a line for each worker that torchrun starts, is about to stop, or finds ended.

    The supervisor sees the ends of workers sooner than torchrun. But a worker may end before it knows of it, and
    torchrun may reap it first. Then torchrun gives the other workers 30 s to obey SIGTERM before it prints anything
    (``SubprocessContext._poll`` in torch/distributed/elastic/multiprocessing/api.py, 2.13).
    """

    # While a worker is reaped and told of, a halt waits: else nobody would hear of that worker's end. To block the signal
    # would not do, since torch's other threads get it, too. Only the main thread touches both.
    is_telling = False
    halted_by: int | None = None

    def __init__(self, path: str) -> None:
        self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._told: set[int] = set()

    def follow(self) -> None:
        """Have torchrun tell; without the names below, which torch 2.3 to 2.14 has, the agent fails at its start."""
        # Not the module's `Popen`, which torch 2.8 does not have.
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        start, stop = SubprocessHandler._popen, SubprocessHandler.close

        def popen(handler: Any, args: Any, env: dict[str, str]) -> Any:
            worker = start(handler, args, env)
            self.tell("started", worker.pid, env["RANK"], env["LOCAL_RANK"])
            poll, wait = worker.poll, worker.wait
            worker.poll = lambda: self._polled(worker.pid, poll)
            worker.wait = lambda *limits, **named: self._ended(worker.pid, wait(*limits, **named))
            return worker

        def close(handler: Any, *signals: Any, **named: Any) -> None:
            self.tell("stopping", handler.proc.pid, time.monotonic())
            stop(handler, *signals, **named)

        SubprocessHandler._popen, SubprocessHandler.close = popen, close

    def _polled(self, pid: int, poll: Callable[[], int | None]) -> int | None:
        News.is_telling = True
        try:
            return self._ended(pid, poll())
        finally:
            News.is_telling = False
            if News.halted_by is not None:
                halt(News.halted_by, None)

    def _ended(self, pid: int, status: int | None) -> int | None:
        if status is not None and pid not in self._told:
            self._told.add(pid)
            self.tell("ended", pid, status)
        return status

    def tell(self, *words: object) -> None:
        """Write a line."""
        with suppress(OSError):  # the supervisor is gone
            os.write(self._pipe, " ".join(map(str, words)).encode() + b"\n")


def await_store(arguments: list[str]) -> str:
    """Wait until torch's store listens on the node that has it; at once on that node. Return why it can't be reached, or "".

    A store's client that comes before its server tries again only after some hundred milliseconds (torch 2.13,
    TCPStore.cpp: an exponential backoff with jitter). With spares, all agents come within less than one such pause.

    A refusal is an answer: the store does not listen yet, so after `STORE_S` seconds torch waits for it, 15 minutes by
    default. A firewall that drops gives none. torch would wait as long, and name no node then.
    """
    own = takewhile(lambda word: word != "--", arguments)  # the script's follow
    options = dict(word.removeprefix("--").partition("=")[::2] for word in own)
    host, _, port = options.get("rdzv-endpoint", "").rpartition(":")
    if options.get("node-rank", "0") == "0":
        return ""
    began, pause_s, limit_s, why = time.monotonic(), _LOOK_S, SILENCE_S, ""
    while (left_s := began + limit_s - time.monotonic()) > 0.0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), left_s).close()
            return ""
        except ConnectionRefusedError:
            limit_s = STORE_S
        except (socket.gaierror, ValueError):  # a name that nobody knows, or that is none: torch tells of it
            return ""
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _MAX_LOOK_S)
    return why if limit_s > STORE_S else ""


if __name__ == "__main__":
    with suppress(Exception):  # a Python without ctypes
        import ctypes

        # PR_SET_PDEATHSIG of <linux/prctl.h>: SIGTERM when the supervisor ends, even where its parent is killed, too.
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    signal.signal(int(sys.argv.pop(2)), halt)  # before torch is imported, which takes a while
    own = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] == own:  # not with PYTHONSAFEPATH
        del sys.path[0]
    own_pid = os.getpid()
    os.environ["TORCHRUN_AGENT_PID"] = str(own_pid)  # by which its children know that they are workers
    pipes, sys.argv[0] = sys.argv.pop(1), "torchrun"  # as the error of a wrong option calls it
    argparse.ArgumentParser.print_usage = lambda *_: None  # type: ignore[method-assign]  # on each node a screen full
    change_workers(pipes, os.environ.pop("TORCHRUN_RESTARTS", ""), os.environ.pop("TORCHRUN_METRICS_FOLDER", ""))
    news = News(os.path.join(pipes, "agent.workers"))
    news.follow()
    from torch.distributed.run import main

    if _why := await_store(sys.argv):
        news.tell("unreached", own_pid, _why)
    main()
