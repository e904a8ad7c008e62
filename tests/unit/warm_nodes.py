"""Spares of one node, for tests: a package of the tests stands for torch, and imports in no time."""

import json
import os
import shutil
import sys
from pathlib import Path

from limits import limit_s
from supervised import Supervised
from unit_helpers import HANG_S, eventually, is_running, write

from metaflow_extensions.torchrun.plugins.torchrun.machine.processes import living_descendants
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import command as launch_command
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.agent import End, Refused
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.command import WORKER_HOOKS

STAND_IN = Path(__file__).parents[1] / "stand_in" / "torch"
# What stands for torchrun: it tells what it sees, starts workers, and waits where it is to.
AGENT = """
import json, os, subprocess, sys, time
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

def main():
    out, what, count, *script = sys.argv[1:]
    seen = {"imported": "spare.py" in open("/proc/self/cmdline").read(), "env": dict(os.environ)}
    with open(out + ".part", "w") as file:
        json.dump(seen, file)
    os.replace(out + ".part", out)
    if what == "early":
        sys.exit(3)
    workers = []
    for rank in range(int(count)):
        folder = f"{out}.{rank}"
        os.makedirs(folder)
        env = {**os.environ, "RANK": str(rank + 4), "LOCAL_RANK": str(rank)}
        env["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        with open(f"{out}.{rank}.out", "w") as stdout, open(os.devnull, "w") as stderr:
            workers.append(SubprocessHandler([sys.executable, "-u", *script], env, stdout, stderr).proc)
    while what == "wait":
        time.sleep(60)
    sys.exit(5 if any([worker.wait() for worker in workers]) else 0)

if __name__ == "__main__":
    main()
"""
WORKER = """
import json, os, sys
seen = {"imported": "torch.distributed" in sys.modules, "early": "imported_early" in sys.modules}
print(json.dumps({**seen, "rank": os.environ.get("RANK")}), flush=True)
"""


class Warm:
    """The spares of one node, and the agents that are asked of them one after the other."""

    def __init__(self, root, early="", in_agent="", preload=("imported_early",), workers=0, before=""):
        self.root, self.count, self.workers = root, 0, workers
        write(root / "imported_early.py", early)
        shutil.copytree(STAND_IN, root / "torch")
        write(root / "torch" / "distributed" / "run.py", in_agent + AGENT)
        self.script = str(write(root / "scripts" / "worker.py", WORKER))
        self.env = {**os.environ, "PYTHONPATH": f"{WORKER_HOOKS}:{root}"}
        os.mkfifo(root / "agent.workers")
        self.supervised = Supervised(before)
        code = "global node; node = WarmNode(preload, env, workers); node.prepare()"
        self.do(code, preload=preload, env=self.env, workers=workers)

    def do(self, what, **values):
        """Have code executed in the process that stands for the supervisor."""
        self.supervised.ask("do(what, **values)", what=what, values=values)

    @property
    def pid(self):
        """The pid of the spare that waits."""
        return self.supervised.ask("node._waiting.process.pid")

    def start(self, what="", env=None, workers=None, script=None, **options):
        """Ask for an agent; return what its events come to."""
        self.count += 1
        out = self.root / f"seen-{self.count}.json"
        logs = {stream: str(self.root / f"agent.{stream}") for stream in ("stdout", "stderr")}
        count = self.workers if workers is None else workers
        options = {**logs, "news": str(self.root / "agent.workers"), "grace_s": 2.0, **options}
        words = [str(out), what, str(count), *(script or [self.script, "löss", ""])]
        told = {
            "command": [sys.executable, launch_command.AGENT, str(self.root), str(launch_command.HALT_SIGNAL), *words],
            "env": {**self.env, **(env or {})},
            "options": options,
            "warm": count if self.workers else 0,
        }
        self.do(f"start({self.count}, command, env, options, warm)", **told)
        self.do("node.prepare()")  # it has asked the first one by now
        return Agent(self.supervised, self.count, out)

    def spares(self):
        """Return the pids of the spare agent that waits, and of its workers, once all of them have imported."""
        found = []

        def all_wait():
            found[:] = [self.pid, *living_descendants(self.pid)]
            return len(found) == 1 + self.workers and all(map(waits, found))

        eventually(all_wait, "all spares")
        return found

    def close(self):
        """End all; at the end of a step, all spares end at once."""
        tree = living_descendants(self.supervised.pid)
        self.supervised.ask("node.close()")
        self.supervised.close()
        eventually(lambda: not [pid for pid in tree if is_running(pid)], "the end of all")


def waits(pid):
    """Tell whether a spare waits for its request, in recvmsg(2)."""
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return any(each in waits_in for each in ("unix", "recv", "skb_wait"))


class Agent:
    """One agent and its events."""

    def __init__(self, supervised, number, out):
        self._supervised, self.number, self.out = supervised, number, out
        self._events, self.seen = supervised.events(number), []

    def stop(self, grace_s):
        self._supervised.ask("agents[number].stop(grace_s)", number=self.number, grace_s=grace_s)

    def expect(self, kind):
        while True:
            event = self._events.get(timeout=limit_s(HANG_S))
            self.seen.append(event)
            if isinstance(event, kind):
                return event

    def end(self):
        """Wait for its end; return what it has noted, with why it was started cold and its exit code."""
        end = self.expect(End)
        noted = json.loads(self.out.read_text())
        refused = [event.reason for event in self.seen if isinstance(event, Refused)]
        return {**noted, "status": end.status, "left": end.left, "refused": refused[0] if refused else None}

    def worker(self, local_rank=0):
        """Return what a worker has noted."""
        text = Path(f"{self.out}.{local_rank}.out").read_text()
        return json.loads(text.splitlines()[-1])
