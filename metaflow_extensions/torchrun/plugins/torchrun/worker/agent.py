"""The agent of a node: torchrun, whose workers write to the pipes that this node reads, and know the gang's restarts.

Usage: ``agent.py PIPES SIGNAL TORCHRUN_ARGUMENT...``. It runs as a program, without our package on its path. The working
directory is not on its path either: it may have files named like modules of Python or torch. Workers find modules as
under torchrun.
"""

import os
import signal
import sys

GUARDIAN = os.getppid()


def halt(number: int, _: object) -> None:
    """Act on workers no more, but go on serving torch's store to those that save: it has threads of its own.

    The guardian sends the signal before it stops the workers itself. Only if the guardian is killed does the agent act
    again: the kernel sends SIGTERM then, and torchrun stops its workers.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # so the guardian sees that this process waits
    while os.getppid() == GUARDIAN:
        try:
            signal.pause()
        except BaseException:  # torchrun's handlers of SIGTERM and others raise
            if os.getppid() != GUARDIAN:
                raise


def change_workers(folder: str, restarts: str) -> None:
    """Have torchrun give each worker the pipes of its local rank for stdout and stderr, and the gang's restarts.

    `LogsSpecs` and `LogsDest` are torch's public interface for this (torch 2.3 to 2.14), but to name another class on
    the command line needs an installed entry point, and Metaflow ships our code into pods without those. `reify` also
    sets variables of the workers. `restarts` is "1/3" for restart 1 of at most 3; torchrun itself counts those of
    this one agent, which are always 0.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    find = DefaultLogsSpecs.reify

    def reify(self: DefaultLogsSpecs, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = find(self, envs)
        for local_rank, env in envs.items():
            found.stdouts[local_rank] = os.path.join(folder, f"{local_rank}.stdout")
            found.stderrs[local_rank] = os.path.join(folder, f"{local_rank}.stderr")
            if restarts:
                env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"] = restarts.split("/")
        return found

    DefaultLogsSpecs.reify = reify


if __name__ == "__main__":
    signal.signal(int(sys.argv.pop(2)), halt)  # before torch is imported, which takes a while
    own = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] == own:  # not with PYTHONSAFEPATH
        del sys.path[0]
    change_workers(sys.argv.pop(1), os.environ.pop("TORCHRUN_RESTARTS", ""))
    from torch.distributed.run import main

    main()
