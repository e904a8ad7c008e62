"""Gangs of real processes without Metaflow's tasks: fixtures for tests/chaos and tests/integration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import Host
from limits import eventually, limit_s

NODE = Path(__file__).parent / "nodes" / "node.py"
STAND_IN = Path(__file__).parent / "stand_in"
MARK = "NODE_TEST_MARK"
GRACE_S = 1.0
START_S, END_S = 90.0, 60.0  # for a start, and for an end; more on a slow machine
SILENCE_S = 30.0  # after so long a node that says nothing counts as lost
_LOOK_S = 0.02
_NONE: Mapping[Any, Any] = {}
_LINE = re.compile(r"^\[rank (\d+)\] line (\S+)-(\d+) (\d+) of a log that nobody may lose$", re.MULTILINE)
_LINE_BYTES = len("line launch0-0-0 000001 of a log that nobody may lose\n")
ETC_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


def marked(name: str, value: str) -> set[int]:
    """Return the pids of all living processes with this variable, however they detached themselves."""
    wanted = f"{name}={value}".encode()
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in (b"Z", b"X") and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.add(int(name))
    return found


def command_line(pid: int, most: int | None = 160) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:most]
    return "gone"


# A reader that does not read for a while, of a pipe that is full soon.
_PAUSING = """
import fcntl, os, sys, time
fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 4096)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
while data := os.read(0, 1 << 20):
    os.write(1, data)
"""


def read_from(path: Path) -> list[str]:
    """Return what stands before a node's command so that nobody reads what it writes until there is such a file."""
    piped = 'reader=$1 until=$2; shift 2; exec "$@" > >(exec python3 -c "$reader" "$until") 2>&1'
    return ["bash", "-c", piped, "bash", _PAUSING, str(path)]


@dataclass
class Outcome:
    """What a fault came to."""

    seconds: float  # from the fault until the last process was gone
    errors: dict[int, dict[str, Any] | None]  # node -> its last error, of the nodes that were there to tell
    left: list[str]  # processes that were not gone in time, and temporary files
    lost_bytes: int  # what workers wrote and is not in their nodes' logs

    @property
    def same(self) -> bool | None:
        """Whether every node that was there to tell says the same; None if none was."""
        if not self.errors:
            return None
        said = {json.dumps(error, sort_keys=True) for error in self.errors.values()}
        return len(said) == 1 and None not in self.errors.values()

    @property
    def error(self) -> dict[str, Any]:
        """What they say."""
        assert self.same, self.errors
        return next(iter(self.errors.values()))


@dataclass
class Gang:
    """Nodes, each a process with a log of its own; the files that they and their workers run are in tests/nodes."""

    out: Path
    hosts: Sequence[Host] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    nproc: int = 1
    warm: str | None = None
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    # --- starting -------------------------------------------------------------------------------

    def start(
        self,
        num_nodes: int = 2,
        nproc: int = 1,
        do: str = "",
        settings: Mapping[str, Any] = _NONE,
        launches: int | dict[int, int] = 1,
        absent: Collection[int] = (),
        late: Mapping[int, float] = _NONE,
        datastore: str | None = None,
        squatted: int | None = None,
        step: Mapping[int, str] = _NONE,
        wrap: Mapping[int, list[str]] = _NONE,
        agent_env: Mapping[str, str] = _NONE,
        own_code: Mapping[int, str] = _NONE,
        main_ip: str = "10.77.0.1",
        etc_hosts: str = ETC_HOSTS,
        entrypoint: str | list[str] = "worker.py",
        stand_in: bool = False,
        **options: Any,
    ) -> None:
        """Start the nodes that are not `absent`.

        `late` says how many seconds after its begin a node joins; `step` what the step's own code does before it joins
        (see ``node.py``), `own_code` what it does before the launches (a node without launches waits); `wrap` is what
        stands before a node's command; `stand_in` has a stand-in for torchrun start the workers, where torchrun has no
        part in what is tested; `main_ip` is the address of a control node with a host of its own, as Metaflow says it,
        ``own name`` what its name resolves to there; `etc_hosts` is for all hosts; `options` are those of ``run``.
        """
        self.out.mkdir(exist_ok=True)
        self.temporary.mkdir()
        self.nproc = nproc
        (self.out / "hosts").write_text(etc_hosts)
        env = {"CHAOS_OUT": str(self.out), "WORKER_DO": do, **agent_env}
        own = {"grace_s": GRACE_S, "nproc_per_node": nproc, "warm": self.warm}
        own |= {"all_nodes_started_timeout": limit_s(START_S), "heartbeat_timeout_s": limit_s(SILENCE_S)}
        self._tasks, self._wrap = {}, wrap
        self._stand_in = {"PYTHONPATH": str(STAND_IN)} if stand_in else {}
        for node in range(num_nodes):
            count = launches if isinstance(launches, int) else launches[node]
            self._tasks[node] = {
                "node": node,
                "num_nodes": num_nodes,
                "out": str(self.out),
                "settings": {**own, **settings},
                "main_ip": main_ip if self.hosts else None,
                "entrypoint": entrypoint,
                "options": {"nproc_per_node": nproc, "env": env, **options},
                "datastore": datastore,
                "squatted": squatted,
                "start_after_s": late.get(node, 0),
                "step": step.get(node),
                "launches": count,
                "own_code": own_code.get(node, "" if count else "wait"),
            }
            if node not in absent:
                self.start_node(node)

    def start_node(self, node: int) -> None:
        """Start one node."""
        command = [*self._wrap.get(node, []), sys.executable, str(NODE), json.dumps(self._tasks[node])]
        if self.hosts:
            command = self.hosts[node].command(self.out / "hosts", *command)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")}
        with open(self.log_path(node), "wb") as log:
            self.processes[node] = subprocess.Popen(
                command,
                cwd=self.out,
                env={
                    **kept,
                    **self._stand_in,
                    "CHAOS_NODE": str(node),
                    "METAFLOW_USER": "tester",
                    "TMPDIR": str(self.temporary),
                    MARK: self.mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def temporary(self) -> Path:
        """Where the temporary files of all nodes go."""
        return self.out / "tmp"

    # --- looking --------------------------------------------------------------------------------

    def log_path(self, node: int) -> Path:
        return self.out / f"log-{node}.txt"

    def log(self, node: int) -> str:
        return self.log_path(node).read_text(errors="replace")

    @property
    def told(self) -> str:
        """The logs without the workers' lines, for a failed assertion."""
        lines = []
        for node in self.processes:
            lines += [f"{node}: {line[:300]}" for line in _LINE.sub("", self.log(node)).splitlines() if line]
        return "\n".join(lines[-150:])

    def note(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def await_note(self, name: str) -> Any:
        self.await_that((self.out / name).exists, name)
        return self.note(name)

    def await_age(self, moment: float, seconds: float) -> None:
        """Wait until a moment is so long ago, while the nodes live."""
        self.await_that(lambda: time.monotonic() > moment + seconds, f"{seconds} s")

    def await_that(self, condition: Callable[[], Any], what: str) -> None:
        def holds() -> bool:
            is_over = all(process.poll() is not None for process in self.processes.values())
            does = bool(condition())
            assert does or not is_over, f"all nodes have ended without {what}\n{self.told}"
            return does

        eventually(holds, lambda: f"{what}\n{self.told}", limit_s(START_S))

    def await_workers(self, run_id: str = "launch0-0", lines: int = 3, num_nodes: int | None = None) -> None:
        """Wait until every worker of a generation, by default on all nodes, has written a few lines."""
        count = (len(self._tasks) if num_nodes is None else num_nodes) * self.nproc
        self.await_that(lambda: all(self.lines_of(rank, run_id) >= lines for rank in range(count)), run_id)

    def worker(self, rank: int, run_id: str = "launch0-0") -> int:
        return int(self.note(f"worker-{run_id}-{rank}")["pid"])

    def agent(self, rank: int, run_id: str = "launch0-0") -> int:
        return int(self.note(f"worker-{run_id}-{rank}")["agent"])

    def between(self, node: int) -> int:
        """Return the pid of the parent of a node's supervisor."""
        return psutil.Process(self.supervisor(node)).ppid()

    def supervisor(self, node: int) -> int:
        """Return the pid of a node's supervisor, once it runs; its parent was told the task's pid."""
        found: list[int] = []

        def is_there() -> bool:
            lines = {pid: command_line(pid, None).split() for pid in self.living()}
            program = "torchrun.supervisor.between"
            of_node = [pid for pid, words in lines.items() if program in words and str(self.task(node)) in words[-4:]]
            # A helper, the task's child, has the same command line until it has started that.
            with suppress(psutil.NoSuchProcess):
                parents = {pid: psutil.Process(pid).ppid() for pid in of_node}
                found[:] = [pid for pid, parent in parents.items() if parent in of_node]
                return len(of_node) == 2 and len(found) == 1 and self.task(node) not in parents.values()
            return False

        self.await_that(is_there, f"the supervisor of node {node}")
        return found[0]

    def task(self, node: int) -> int:
        return self.processes[node].pid

    def living(self) -> set[int]:
        """Return the pids of the nodes and of all that came of them; while a node calls exec, its mark can't be read."""
        return marked(MARK, self.mark) | {each.pid for each in self.processes.values() if each.poll() is None}

    def lines_of(self, rank: int | str, run_id: str = "launch0-0") -> int:
        """Return how many lines a worker has written."""
        ledger = self.out / f"ledger-{run_id}-{rank}"
        return int(ledger.read_text() or 0) if ledger.exists() else 0

    # --- doing ----------------------------------------------------------------------------------

    def tell(self, rank: int, order: str, run_id: str = "launch0-0") -> None:
        """Give a running worker an order."""
        path = self.out / f"do-{run_id}-{rank}"
        path.with_suffix(".part").write_text(order)
        path.with_suffix(".part").rename(path)

    def begin_launch(self, number: int) -> None:
        """Let the nodes call `run` for the (number + 1)th time; the first needs no leave."""
        (self.out / f"launch-{number}").touch()

    def await_steps(self) -> None:
        """Wait until the nodes have joined and run code of their own."""
        for node in self.processes:
            self.await_note(f"step-{node}.json")

    def end_steps(self) -> float:
        """Let the nodes whose own code waits for it end it, and return when."""
        (self.out / "launch-end").touch()
        return time.monotonic()

    def await_launch(self, number: int) -> None:
        """Wait until a launch is over on all nodes."""
        self.await_that(lambda: all(len(self.launches(node)) > number for node in self.processes), f"launch {number}")

    def let_go(self) -> None:
        """Let all workers end well."""
        (self.out / "finish").touch()

    def send(self, pid: int, number: signal.Signals) -> float:
        """Send a signal and return when."""
        os.kill(pid, number)
        return time.monotonic()

    def struck_at(self, rank: int, run_id: str = "launch0-0") -> float:
        """Return when a worker did what it was told, as it noted itself."""
        return float(self.await_note(f"struck-{run_id}-{rank}"))

    # --- the end --------------------------------------------------------------------------------

    def await_end(
        self, struck_at: float, survivors: Collection[int], ignore: Collection[int] = (), leaves_folders: bool = False
    ) -> Outcome:
        """Wait until no process is left but those to `ignore`, but not for ever.

        A supervisor that was killed `leaves_folders`.
        """
        until = struck_at + limit_s(END_S)
        while (left := self.living() - set(ignore)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        seconds = time.monotonic() - struck_at
        names = [f"{pid} {command_line(pid)}" for pid in left]
        if not ignore and not leaves_folders:  # who still lives may still need it
            names += [str(path) for path in self.temporary.glob("torchrun-*")]
        return Outcome(seconds, {node: self.error(node) for node in survivors}, names, self.lost_bytes(survivors))

    def end_well(self) -> Outcome:
        """Let the workers end and wait for the nodes, which must end well."""
        self.let_go()
        if not any(task["launches"] for task in self._tasks.values()):
            self.await_steps()
            self.end_steps()
        outcome = self.await_end(time.monotonic(), self.processes)
        assert all(self._said(node).get("ended_well") for node in self.processes), self.told
        return outcome

    def launch(self, node: int, number: int = 0) -> dict[str, Any]:
        """Return what came of one launch on one node."""
        return self.launches(node)[number]

    def launches(self, node: int) -> list[dict[str, Any]]:
        """Return what came of each launch so far on one node."""
        return self._said(node).get("launches", [])

    def error(self, node: int) -> dict[str, Any] | None:
        """Return what ended a node, or None if it ended well or told nothing."""
        return self._said(node).get("error")

    def _said(self, node: int) -> dict[str, Any]:
        name = f"node-{node}.json"
        return self.note(name) if (self.out / name).exists() else {}

    def lost_bytes(self, nodes: Collection[int]) -> int:
        """Count what workers of these nodes have written and their logs lack; lines out of order are lost, too."""
        return sum(self._lost_lines(node) for node in nodes) * _LINE_BYTES

    def _lost_lines(self, node: int) -> int:
        shown: dict[str, list[int]] = {}
        for rank, run_id, own, number in _LINE.findall(self.log(node)):
            assert rank == own, f"rank {own}'s line is shown as rank {rank}'s"
            shown.setdefault(f"{run_id}-{rank}", []).append(int(number))
        for worker, numbers in shown.items():
            assert numbers == sorted(set(numbers)), f"lines of {worker} are shown twice or out of order"
        lost = 0
        for ledger in self.out.glob("ledger-*"):
            worker = ledger.name.removeprefix("ledger-")
            if self.note(f"worker-{worker}")["node"] == node:
                lost += len(set(range(1, int(ledger.read_text() or 0) + 1)) - set(shown.get(worker, ())))
        return lost

    def kill(self) -> list[str]:
        """End whatever is left; return what it was."""
        left = [command_line(pid) for pid in self.living()]
        while living := self.living():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        for process in self.processes.values():
            process.wait(10)
        return left


@pytest.fixture
def make_gang(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gang]]:
    """Return a function that makes a gang; at the end of the test nothing of it is left."""
    made: list[Gang] = []
    warm = request.config.getoption("--chaos-warm", None)

    def make(hosts: Sequence[Host] = ()) -> Gang:
        made.append(Gang(tmp_path / f"gang-{len(made)}", hosts, warm=warm))
        return made[-1]

    yield make
    for gang in made:
        gang.kill()


@pytest.fixture
def gang(make_gang: Callable[..., Gang]) -> Gang:
    """Return a gang whose nodes talk over this machine's loopback interface."""
    return make_gang()
