"""A process that runs agents and spares as a supervisor does, under its parent; tests tell it what to do."""

import json
import queue
import subprocess
import sys
import threading

from limits import limit_s
from unit_helpers import HANG_S, OURS, eventually, is_running

from metaflow_extensions.torchrun.plugins.torchrun.supervisor import agent as agent_events

GRACE_S = 0.3
PROGRAM = f"""{OURS}
import asyncio, inspect, json, os, resource, signal, types
from ours.compat import linux
from ours.supervisor.warm import WarmNode
from ours.machine import processes
from ours.supervisor.agent import AgentProcess, Options
from ours.supervisor import between
agents = {{}}

def say(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

def start(number, command, env, options, warm=None):
    def tell(event):
        say(number=number, event=type(event).__name__, values=list(event))
    from_spare = None if warm is None else (lambda env, options: node.start(command, warm, env, options))
    agents[number] = AgentProcess(tell, command, env, Options(**{{"halt_signal": signal.SIGSTOP, **options}}), from_spare)
    agents[number].start()

async def answer(code, values):
    scope = {{**globals(), **values}}
    try:
        found = eval(code, scope)
        say(found=await found if inspect.isawaitable(found) else found)
    except BaseException as error:
        say(error=f"{{type(error).__name__}}: {{error}}")

def do(code, **values):
    exec(code, globals(), values)

async def serve():
    tasks, data = [], b""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    def read():
        nonlocal data
        more = os.read(0, 1 << 20)
        *lines, data = (data + more).split(b"\\n")
        for line in lines:
            tasks.append(loop.create_task(answer(**json.loads(line))))
        if not more:
            loop.remove_reader(0)
            is_over.set()
    loop.add_reader(0, read)
    say(pid=os.getpid())
    await is_over.wait()

def supervise(parent):
    linux.adopt_orphans()
    asyncio.new_event_loop().run_until_complete(serve())
    return 0

def fork_but_once(fork=os.fork, calls=[]):
    calls.append(True)
    return 0 if len(calls) == 1 else fork()  # the test waits for the process between

os.fork = fork_but_once
module = sys.modules["ours.supervisor.process"] = types.ModuleType("process")
module.main = supervise
exec(sys.argv.pop(1))
os._exit(between.main())
"""


class Supervised:
    """Such a process. `before` is code that it executes first."""

    def __init__(self, before=""):
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, before, str(GRACE_S)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answers, self._events = queue.SimpleQueue(), {}
        self.pid = json.loads(self._process.stdout.readline())["pid"]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            told = json.loads(line)
            if "event" in told:
                event = getattr(agent_events, told["event"])(*told["values"])
                self.events(told["number"]).put(event)
            else:
                self._answers.put(told)

    def events(self, number):
        """Return the queue of an agent's events."""
        return self._events.setdefault(number, queue.SimpleQueue())

    def ask(self, code, **values):
        """Return the value of an expression; fail if it has raised."""
        told = json.dumps({"code": code, "values": values})
        self._process.stdin.write(told.encode() + b"\n")
        self._process.stdin.flush()
        told = self._answers.get(timeout=limit_s(HANG_S))
        assert "error" not in told, told["error"]
        return told["found"]

    def close(self):
        """End it; its parent ends what is left, and then itself."""
        self._process.stdin.close()
        self._process.wait(limit_s(HANG_S))
        eventually(lambda: not is_running(self.pid), "its end")
        self._reader.join()
        self._process.stdout.close()
