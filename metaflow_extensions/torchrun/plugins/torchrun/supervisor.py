"""One launch on one node: joins the agent's process tree with the gang's decisions.

`Supervisor.run` reports *ready*, obeys *go*, *stop* and the *verdict*, and reports what happens to the
workers meanwhile. Everything it waits for, messages of the gang and events of the agent alike,
arrives in one queue.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .devices import Machine, omp_threads
from .errors import TorchrunError, from_wire
from .events import Event
from .failure import (
    TAIL_LINES,
    Cause,
    WorkerEnd,
    describe_exit,
    ends_reported_by_agent,
    pids_stopped_by_agent,
    read_tail,
    worker_cause,
)
from .gang import CONTROL, Message
from .launch_spec import LaunchSpec, Rendezvous, agent_command, agent_environment, shown
from .logs import LogFollower, worker_folder
from .membership import Membership
from .memory import describe_oom, memory_limit, oom_kills
from .network import interface_of, interface_towards
from .process import AgentProcess
from .result import TorchrunResult

# Reports stay far below the channel's frame limit; eight failures say enough of one node.
_MAX_CAUSES = 8
# How long to wait for the gang's verdict after the control node had to have decided.
_VERDICT_MARGIN_S = 30.0


@dataclass
class Generation:
    """The workers between one *go* and their end, on this node."""

    number: int
    folder: str
    command: list[str]
    agent: AgentProcess
    follower: LogFollower
    agent_stderr: str
    oom_kills_before: int | None = None
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    reaped: dict[int, int] = field(default_factory=dict)  # local rank -> pid, of ends that torchrun alone saw
    reaped_failed: bool = False
    stopping: bool = False
    preempted: bool = False
    agent_exit: int | None = None
    error: str | None = None


class Supervisor:
    """One launch on one node.

    Parameters
    ----------
    spec : LaunchSpec
        What to run.
    membership : Membership
        This node's seat in the gang.
    main_addr : str
        Address of the control node as this node reaches it.
    machine : Machine
        What this node may use.
    grace_s : float
        Seconds workers have between SIGTERM and SIGKILL.
    timeout_s : float or None
        How long the launch may take from *go*; the control node's value counts.
    facts : mapping
        What must agree besides the launch itself, for example the torch version.
    write : callable
        Takes the workers' output: stream name and text.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        membership: Membership,
        main_addr: str,
        machine: Machine,
        grace_s: float,
        timeout_s: float | None,
        facts: Mapping[str, Any],
        write: Callable[[str, str], None],
    ) -> None:
        self._spec = spec
        self._seat = membership
        self._main_addr = main_addr
        self._machine = machine
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._facts = dict(facts)
        self._write = write
        self._launch = -1
        self._generation: Generation | None = None
        self._verdict: TorchrunError | None = None
        self._went_at = 0.0
        self._command: list[str] = []
        self._exit_codes: dict[int, int] = {}
        self._restarts: list[dict[str, Any]] = []

    def run(self) -> TorchrunResult:
        """Run the launch to its end on all nodes.

        Raises
        ------
        TorchrunError
            The gang's verdict, the same on every node.
        """
        self._launch = self._seat.begin_launch()
        try:
            with self._clean_up():
                self._seat.send(self._ready())
                self._obey()
        finally:
            self._seat.end_launch(self._verdict)
        return self._result()

    # --- the gang's words -----------------------------------------------------------------------

    def _ready(self) -> Message:
        spec = self._spec
        return {
            "type": "ready",
            "launch": self._launch,
            "nproc": spec.nproc,
            "python": ".".join(platform.python_version_tuple()[:2]),
            "digest": spec.digest(),
            "master_port": spec.master_port,
            "max_restarts": spec.max_restarts,
            "timeout_s": self._timeout_s,
            **self._facts,
        }

    def _obey(self) -> None:
        """Do what arrives until the verdict."""
        give_up_at: float | None = None
        while True:
            message = self._next(give_up_at)
            if message.get("launch", self._launch) != self._launch:
                continue  # late news of a launch that the step's code gave up
            kind = message["type"]
            if kind == "verdict":
                if message["error"] is not None:
                    self._verdict = from_wire(message["error"])
                    raise self._verdict
                return
            if kind == "go":
                self._go(message)
            elif kind == "restart":
                self._note_restart(message)
            elif kind == "stop" and self._generation is not None:
                give_up_at = time.monotonic() + self._grace_s + _VERDICT_MARGIN_S
                if self._seat.node == CONTROL and message.get("because"):
                    self._emit("stopping", f"{message['because']}; stopping all nodes")
                self._stop("the gang stops")
            elif kind == "agent_event":
                self._on_agent_event(message["event"], message["generation"])
                if self._generation is None:
                    give_up_at = None
            elif kind == "abort":
                raise self._seat.broken or TorchrunError("The gang was stopped.")
            elif kind == "terminated":
                self._preempted()

    def _preempted(self) -> None:
        """Tell the gang that this node must end, and go on until its verdict; the second time, end at once."""
        generation, error = self._generation, self._seat.terminated()
        if generation is None or generation.preempted:
            raise error
        generation.preempted = True
        what = Cause.from_wire(error.cause).what if error.cause else str(error)
        self._emit("stopping", f"{what}; stopping all nodes", preempted=True)
        self._tell(error, generation)

    def _note_restart(self, message: Message) -> None:
        cause = Cause.from_wire(message["cause"])
        number, pause = message["generation"], message["pause_s"]
        self._restarts.append({"generation": number, "cause": message["cause"]})
        text = f"restart {number} of {message['of']} in {pause:g} s, because {cause.who} {cause.what}"
        self._emit("restart", text, generation=number, cause=message["cause"])

    def _next(self, give_up_at: float | None) -> Message:
        """Return the next message; raise if the gang's verdict is overdue."""
        while True:
            try:
                # Waking up now and then also lets Python run its signal handlers.
                return self._seat.inbox.get(timeout=0.5)
            except queue.Empty:
                self._look_at_reaped()
                if give_up_at is not None and time.monotonic() > give_up_at:
                    raise TorchrunError(
                        f"The workers of node {self._seat.node} were told to stop but did not end within "
                        f"{self._grace_s + _VERDICT_MARGIN_S:g} s; they may hang in the kernel. Look at the node's devices."
                    ) from None

    # --- one generation -------------------------------------------------------------------------

    def _go(self, message: Message) -> None:
        spec, number = self._spec, int(message["generation"])
        if number == 0:
            self._went_at = time.monotonic()
        folder = self._make_folder(number)
        run_id = f"launch{self._launch}-{number}"
        meeting = Rendezvous(self._main_addr, int(message["port"]), run_id, int(message["restarts"]))
        # The control node's number counts, for all nodes.
        command = agent_command(replace(spec, max_restarts=int(message["max_restarts"])), meeting, folder)
        # The connection to the others knows best which interface reaches them; a gang of one has none.
        own = message.get("own_address")
        interface = interface_of(own) if own else interface_towards(self._main_addr)
        env = agent_environment(spec, os.environ, omp_threads(self._machine, spec.nproc), interface)
        if self._machine.nodes_here > 1 and self._machine.accelerators:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._machine.own_accelerators)
        logs = {stream: os.path.join(folder, f"agent.{stream}") for stream in ("stdout", "stderr")}
        for path in logs.values():
            open(path, "wb").close()
        follower = LogFollower(folder, logs, self._label, f"[torchrun node {spec.node_index}] ", self._write)
        scratch = None if spec.log_dir is not None else folder
        agent = AgentProcess(
            command, env, logs, self._grace_s, self._forward(number), workers=spec.nproc, cwd=spec.cwd, scratch=scratch
        )
        self._generation = Generation(number, folder, command, agent, follower, logs["stderr"], oom_kills())
        self._command = command
        self._emit("command", f"runs: {shown(command)}", command=command)
        follower.start()
        agent.start()

    def _forward(self, generation: int) -> Callable[[dict[str, Any]], None]:
        def put(event: dict[str, Any]) -> None:
            self._seat.inbox.put({"type": "agent_event", "generation": generation, "event": event})

        return put

    def _label(self, local_rank: int) -> str | None:
        shown_ranks = self._spec.shown_local_ranks
        if shown_ranks is not None and local_rank not in shown_ranks:
            return None
        return f"[rank {self._spec.global_rank(local_rank)}] "

    def _make_folder(self, number: int) -> str:
        name = f"torchrun-node{self._spec.node_index}-launch{self._launch}-{number}-"
        if self._spec.log_dir is not None:
            os.makedirs(self._spec.log_dir, exist_ok=True)
        return tempfile.mkdtemp(prefix=name, dir=self._spec.log_dir)

    def _on_agent_event(self, event: dict[str, Any], number: int) -> None:
        generation = self._generation
        if generation is None or generation.number != number:
            return
        if event["event"] == "worker_end":
            self._worker_ended(generation, event)
        elif event["event"] == "worker_reaped":
            generation.reaped[event["local_rank"]] = event["pid"]
            generation.ended_at[event["local_rank"]] = event["t"]
        elif event["event"] == "agent_end":
            self._agent_ended(generation, event["status"])
        elif event["event"] == "end":
            self._generation_ended(generation, event)

    def _worker_ended(self, generation: Generation, event: dict[str, Any]) -> None:
        # If torchrun stops this one, it has seen another fail that we did not see.
        by_agent = event["status"] != 0 and event["pid"] in pids_stopped_by_agent(generation.agent_stderr)
        stopped = event["stopped"] or by_agent
        end = WorkerEnd(event["local_rank"], event["rank"], event["status"], stopped, 0.0)
        generation.ends[end.local_rank] = end
        generation.ended_at[end.local_rank] = event["t"]
        if by_agent and generation.reaped and not generation.stopping:
            self._reaped_worker_failed(generation)
        elif end.exit_code != 0 and not end.stopped and not generation.stopping:
            text = f"rank {end.rank} {_how_ended(generation, end.exit_code)}; stopping all nodes"
            self._emit("worker_failed", text, rank=end.rank, exit_code=end.exit_code)
            self._report("failed", generation)
            self._stop("a worker failed")

    def _reaped_worker_failed(self, generation: Generation) -> None:
        generation.reaped_failed = True
        rank = self._spec.global_rank(_failed_unseen(generation))
        self._emit("worker_failed", f"rank {rank} failed; stopping all nodes", rank=rank)
        self._report("failed", generation)
        self._stop("a worker failed")

    def _look_at_reaped(self) -> None:
        """See whether torchrun stops its workers because of an end that we did not see."""
        generation = self._generation
        if generation is None or not generation.reaped or generation.stopping:
            return
        stopped = pids_stopped_by_agent(generation.agent_stderr)
        seen = any(end.exit_code != 0 and not end.stopped for end in generation.ends.values())
        if stopped and not seen and set(generation.reaped.values()) - stopped:
            self._reaped_worker_failed(generation)

    def _agent_ended(self, generation: Generation, status: int) -> None:
        """The agent ended by itself: fine, or before us it saw a worker fail, or it failed itself."""
        generation.agent_exit = status
        if status != 0 and not generation.stopping:
            self._add_unseen_ends(generation)
            self._emit(
                "worker_failed", f"{self._first_failure(generation, status)}; stopping all nodes", exit_code=status
            )
            self._report("failed", generation, final=True)
            generation.stopping = True

    def _first_failure(self, generation: Generation, agent_status: int) -> str:
        """Return what the log says of an agent that ended before the guardian saw why."""
        failed = [end for end in generation.ends.values() if end.exit_code != 0 and not end.stopped]
        if not failed:
            return f"the torchrun agent {describe_exit(agent_status)}"
        return f"rank {failed[0].rank} {_how_ended(generation, failed[0].exit_code)}"

    def _stop(self, why: str) -> None:
        generation = self._generation
        if generation is not None and not generation.stopping:
            generation.stopping = True
            self._emit("stopping", "", why=why)
            generation.agent.stop(self._grace_s)

    def _generation_ended(self, generation: Generation, event: dict[str, Any]) -> None:
        if generation.agent_exit is None:
            generation.agent_exit, generation.error = event["status"], event["error"]
        self._add_unseen_ends(generation)
        generation.follower.finish()
        generation.agent.close(0.0)
        if event["left"]:
            self._emit("left_behind", f"stopped what the workers had left running: {', '.join(event['left'])}")
        self._exit_codes = {end.rank: end.exit_code for end in generation.ends.values()}
        self._report("ended", generation, final=True)
        self._remove(generation)
        self._generation = None

    def _add_unseen_ends(self, generation: Generation) -> None:
        """Fill in the workers whose end the guardian did not see from what torchrun says."""
        reported = ends_reported_by_agent(generation.agent_stderr)
        if generation.agent_exit == 0:
            reported = dict.fromkeys(range(self._spec.nproc), 0)
        for local_rank, code in reported.items():
            if local_rank not in generation.ends:
                rank = self._spec.global_rank(local_rank)
                stopped = code == -signal.SIGTERM or (generation.stopping and local_rank not in generation.reaped)
                generation.ends[local_rank] = WorkerEnd(local_rank, rank, code, stopped, 0.0)

    def _report(self, kind: str, generation: Generation, final: bool = False) -> None:
        message: Message = {"type": kind, "launch": self._launch, "generation": generation.number}
        message["causes"] = list(self._causes(generation, final))[:_MAX_CAUSES]
        if kind == "ended":
            message["ok"] = generation.agent_exit == 0
            message["ended_well"] = sorted(end.rank for end in generation.ends.values() if end.exit_code == 0)
        self._seat.send(message)

    def _causes(self, generation: Generation, final: bool) -> Iterator[dict[str, Any]]:
        """Yield this node's failures with their age, the earliest first; the agent's own only when no worker's is known."""
        seat, now = self._seat, time.monotonic()
        found = False
        # Of an end that we did not see, what the worker left may tell; its exit code is not known yet.
        unseen = [
            WorkerEnd(local_rank, self._spec.global_rank(local_rank), -signal.SIGTERM, True, 0.0)
            for local_rank in generation.reaped.keys() - generation.ends.keys()
        ]
        ends = [*generation.ends.values(), *unseen]
        for end in sorted(ends, key=lambda end: generation.ended_at.get(end.local_rank, now)):
            folder = worker_folder(generation.folder, end.local_rank)
            stderr, error_file = os.path.join(folder, "stderr.log"), os.path.join(folder, "error.json")
            cause = worker_cause(end, seat.node, seat.host, stderr, error_file)
            if cause is not None:
                found = True
                if cause.kind == "signal" and _out_of_memory(generation, end.exit_code):
                    cause = replace(cause, kind="oom", exception=describe_oom(memory_limit()))
                yield {"cause": cause.to_wire(), "age_s": now - generation.ended_at.get(end.local_rank, now)}
        if generation.reaped_failed and not found:
            found = True
            yield {"cause": self._reaped_cause(generation).to_wire(), "age_s": 0.0}
        agent_failed = final and not generation.stopping and generation.agent_exit != 0
        if agent_failed and not found:
            yield {"cause": self._agent_cause(generation).to_wire(), "age_s": 0.0}

    def _reaped_cause(self, generation: Generation) -> Cause:
        """Return what can be said of a worker that left no exception and whose exit code nobody told."""
        local_rank = _failed_unseen(generation)
        tail = read_tail(os.path.join(worker_folder(generation.folder, local_rank), "stderr.log"))
        rank = self._spec.global_rank(local_rank)
        return Cause("exit", self._seat.node, self._seat.host, rank, local_rank, detail="\n".join(tail[-TAIL_LINES:]))

    def _agent_cause(self, generation: Generation) -> Cause:
        tail = "\n".join(read_tail(generation.agent_stderr)[-TAIL_LINES:])
        code = generation.agent_exit
        how = generation.error or (_how_ended(generation, code) if code is not None else "vanished")
        return Cause("agent", self._seat.node, self._seat.host, None, None, code, f"its torchrun agent {how}", tail)

    # --- the end --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _clean_up(self) -> Iterator[None]:
        """Whatever ends the launch early: tell the gang first, then stop everything here."""
        try:
            yield
        except BaseException as error:
            generation = self._generation
            if generation is not None:
                self._tell(error, generation)
            raise
        finally:
            if self._generation is not None:
                generation, self._generation = self._generation, None
                generation.agent.close(self._grace_s)
                generation.follower.finish()
                self._remove(generation)
                end = {"launch": self._launch, "generation": generation.number, "ok": False, "causes": []}
                self._seat.send({"type": "ended", **end})

    def _tell(self, error: BaseException, generation: Generation) -> None:
        if error is self._seat.broken:
            return  # the gang knows
        cause = self._seat.cause_of(error)
        report = {"launch": self._launch, "generation": generation.number, "causes": [{"cause": cause, "age_s": 0.0}]}
        self._seat.send({"type": "failed", **report})

    def _remove(self, generation: Generation) -> None:
        if self._spec.log_dir is None:
            shutil.rmtree(generation.folder, ignore_errors=True)

    def _emit(self, kind: Any, text: str, **facts: Any) -> None:
        self._seat.emit(Event(kind, self._seat.node, text, self._launch, facts))

    def _result(self) -> TorchrunResult:
        spec = self._spec
        return TorchrunResult(
            launch=self._launch,
            num_nodes=spec.num_nodes,
            node_index=spec.node_index,
            nproc_per_node=spec.nproc,
            world_size=spec.world_size,
            command=shown(self._command),
            restarts=self._restarts,
            duration_s=time.monotonic() - self._went_at,
            exit_codes=dict(sorted(self._exit_codes.items())),
        )


def _out_of_memory(generation: Generation, exit_code: int) -> bool:
    """Tell whether it was the kernel's out-of-memory killer: its counter has moved since *go*."""
    before, now = generation.oom_kills_before, oom_kills()
    return exit_code == -signal.SIGKILL and before is not None and now is not None and now > before


def _how_ended(generation: Generation, exit_code: int) -> str:
    """Say how a process of this generation ended."""
    return f"ran {describe_oom(memory_limit())}" if _out_of_memory(generation, exit_code) else describe_exit(exit_code)


def _failed_unseen(generation: Generation) -> int:
    """Return the local rank that failed unseen: the last to be reaped that torchrun had not stopped itself.

    Ranks reaped before it ended well; torchrun stops the others at the first failure.
    """
    stopped = pids_stopped_by_agent(generation.agent_stderr)
    own = [rank for rank, pid in generation.reaped.items() if pid not in stopped] or list(generation.reaped)
    return max(own, key=generation.ended_at.__getitem__)
