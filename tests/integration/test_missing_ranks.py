"""Which rank misses which collective: real ones of gloo, on four ranks that torch's flight recorders are asked about."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from limits import eventually

from metaflow_extensions.torchrun.plugins.torchrun.gang.collectives import compare
from metaflow_extensions.torchrun.plugins.torchrun.machine import stacks
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import recorders
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import WORKER_HOOKS

SCRIPT = Path(__file__).parent / "flows" / "misses.py"
LINES = {line.strip(): number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)}
IN_STEP = f"misses.py:{LINES['dist.all_reduce(torch.ones(size), group=group)']}"


@pytest.fixture
def start(tmp_path):
    """Start a program as workers of this process would be; yield what `recorders.ask` takes."""
    started = []

    def start(*argv, ranks=4, **env):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        log_dir = tmp_path / ("a long folder ü" * 8)  # longer than the path of a socket may be
        for rank in range(ranks):
            (folder := log_dir / "run" / "attempt_0" / str(rank)).mkdir(parents=True)
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            hooks = {"PYTHONPATH": WORKER_HOOKS, "TORCHRUN_AGENT_PID": str(os.getpid()), "TORCHRUN_RECORDERS": "1"}
            hooks |= {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), **stacks.hook_environment()}
            told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen([sys.executable, *argv], env={**os.environ, **own, **hooks, **env}, **told))
        call = SimpleNamespace(global_rank=lambda rank: rank, nproc=ranks)
        pids = {rank: worker.pid for rank, worker in enumerate(started)}
        return SimpleNamespace(
            call=call, folder=str(log_dir), codes={}, pids=pids, processes=started, running=lambda: pids
        )

    yield start
    for worker in started:
        worker.kill()
        worker.wait()
        worker.stdout.close()


async def _asked(workers):
    found, (calls, silent) = await asyncio.gather(stacks.ask(workers.pids, 2.0), recorders.ask(workers))
    return compare(calls, silent, found)


def test_each_sentence_names_rank_operation_number_group_and_line(start, tmp_path):
    workers = start(str(SCRIPT), str(tmp_path))

    def told(*parts):
        """Wait for a sentence with these parts."""
        said = [[]]

        def is_there():
            said.append(asyncio.run(_asked(workers)))
            return len(said[-1]) == 1 and all(part in said[-1][0] for part in parts)

        eventually(is_there, lambda: f"{parts}, not {said[-1]}")
        return said[-1][0]

    size = "(1 024 x float32)"
    waits = f"wait in it, at {IN_STEP}."
    told(f"Rank 1 has not called all_reduce no. 2 of group default_pg {size}; it is at", f"Ranks 0, 2, 3 {waits}")
    (tmp_path / "skips").touch()
    of_pair = "all_reduce no. 1 of group dp of ranks 0, 2 (77 x float32)"
    told(f"Rank 2 has not called {of_pair}", f"Rank 0 waits in it, at {IN_STEP}.")
    (tmp_path / "subgroup").touch()
    told(f"Rank 3 has not called all_reduce no. 3 of group default_pg {size}; it is at", f"Ranks 0, 1, 2 {waits}")
    (tmp_path / "loops").touch()
    stopped = "Rank 2 did not answer; process state T (stopped). Ranks 0, 1, 3 wait in all_reduce no. 4 of group "
    told(f"{stopped}default_pg {size}, at {IN_STEP}.")
    os.kill(workers.pids[2], signal.SIGCONT)
    line = LINES["dist.broadcast(torch.ones(1024), 1)"]
    told(
        "Ranks of group default_pg differ in the collective that they have called as no. 5: rank 1 broadcast "
        f"{size}, at misses.py:{line}; ranks 0, 2, 3 all_reduce (16 x float32), at {IN_STEP}."
    )


ENDS = """
import os, torch, torch.distributed as dist
{before}
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
pid = os.fork()
if pid == 0:
    os._exit(0)  # else it waits for threads of gloo's, also without us
os.waitpid(pid, 0)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="file://{file}", rank=int(os.environ["RANK"]), world_size=2)
dist.all_reduce(torch.ones(1))
print("done", sorted(os.listdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))))
"""
UNKNOWN = "import torch._C._distributed_c10d as of_torch; del of_torch._WorkerServer"


@pytest.mark.parametrize("before", ["", UNKNOWN])
def test_a_program_runs_and_ends_as_without_it_and_nothing_is_printed(before, start, tmp_path):
    workers = start("-c", ENDS.format(before=before, file=tmp_path / "store"), ranks=2)
    outputs = [worker.communicate()[0] for worker in workers.processes]
    assert [worker.returncode for worker in workers.processes] == [0, 0], outputs
    served = {"process-groups.jsonl"} if before else {"process-groups.jsonl", "recorders"}
    for text in outputs:
        assert [line for line in text.splitlines() if "Gloo" not in line] == [f"done {sorted(served)}"]


def test_without_a_group_or_without_room_there_is_no_server(start, monkeypatch):
    sleeps = "import torch, time, sys; print('ready', flush=True); time.sleep(1000)"
    workers = start("-c", sleeps, ranks=1)
    assert workers.processes[0].stdout.readline() == "ready\n"
    threads = psutil.Process(workers.pids[0]).num_threads()
    assert asyncio.run(_asked(workers)) == []
    assert threads <= 1 + (os.cpu_count() or 1), "none of ours"
    assert recorders.environment(8) == {"TORCHRUN_RECORDERS": "1"}
    pids, read = {"pids.max": "1024", "pids.current": "1000"}, recorders.processes.read
    monkeypatch.setattr(recorders.processes, "read", lambda path: pids.get(os.path.basename(path)) or read(path))
    assert recorders.environment(8) == {"TORCHRUN_RECORDERS": "0"}
