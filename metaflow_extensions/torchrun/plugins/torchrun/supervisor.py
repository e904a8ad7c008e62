"""One launch on one node: joins the agent's process tree with the gang's decisions.

`Supervisor.run` reports *ready*, obeys *go*, *stop* and the *verdict*, and reports what happens to the
workers meanwhile. Everything it waits for, messages of the gang and events of the agent alike,
arrives in one queue.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .devices import Machine, omp_threads
from .errors import LaunchFailed, TorchrunError, from_wire
from .events import Event
from .evidence import collect, hook_environment
from .failure import SHORT_PEER_ERRORS, Cause, first_reported
from .function_call import FunctionCall
from .gang import EVIDENCE_S
from .generation import Generation, evidence_folder
from .launch_spec import LaunchSpec, Rendezvous, agent_command, agent_environment, shown
from .launch_state import CONTROL, Message
from .logs import LogFollower, Write
from .membership import Membership
from .network import interface_of, interface_towards
from .policy import LaunchPolicy
from .process import AgentProcess
from .result import TorchrunResult
from .transfer import Transfer, TransferFailed

# How long to wait for the gang's verdict after the control node had to have decided.
_VERDICT_MARGIN_S = 30.0
# The gang hears of output once in this part of hang_timeout_s.
_ACTIVE_PART = 0.1


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
    policy : LaunchPolicy
        What is to be done when; the control node's counts.
    grace_s : float
        Seconds workers have between SIGTERM and SIGKILL.
    silence_s : float
        Seconds that a process of this node may be stopped by a signal.
    facts : mapping
        What must agree besides the launch itself, for example the torch version.
    write : callable
        Takes the workers' output, see `logs.Write`.
    call : FunctionCall, optional
        The function that the workers call, where they do.

    Attributes
    ----------
    deposits : dict
        Where the gang's verdict says that values of the function, or what it has raised, lie: global rank -> key.
    """

    # What is stored is carried by a thread of its own (`transfer`), which speaks through the inbox only; everything here
    # belongs to the thread that calls `run`.

    def __init__(
        self,
        spec: LaunchSpec,
        membership: Membership,
        main_addr: str,
        machine: Machine,
        policy: LaunchPolicy,
        grace_s: float,
        silence_s: float,
        facts: Mapping[str, Any],
        write: Write,
        call: FunctionCall | None = None,
    ) -> None:
        self._spec = spec
        self._seat = membership
        self._main_addr = main_addr
        self._machine = machine
        self._policy = policy
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._facts = dict(facts)
        self._write = write
        self._call = call
        self.deposits: dict[str, str] = {}
        self._launch = -1
        self._generation: Generation | None = None
        self._upload: Transfer | None = None  # after the end of the generation `_upload_of`
        self._upload_of = -1
        self._verdict: TorchrunError | None = None
        self._went_at = 0.0
        self._said_active_at = 0.0
        self._command: list[str] = []
        self._exit_codes: dict[int, int] = {}
        self._restarts: list[dict[str, Any]] = []

    def run(self) -> TorchrunResult[Any]:
        """Run the launch to its end on all nodes.

        Raises
        ------
        TorchrunError
            The gang's verdict, the same on every node.
        """
        self._launch = self._seat.begin_launch()
        self._seat.shows_output = self._spec.shown_local_ranks is None
        try:
            with self._clean_up():
                self._seat.send(self._ready())
                self._obey()
        except BaseException:
            self._seat.end_launch(self._verdict, failing=True)
            raise
        self._seat.end_launch(None)
        return self._result()

    # --- the gang's words -----------------------------------------------------------------------

    def _ready(self) -> Message:
        spec = self._spec
        return {
            "type": "ready",
            "launch": self._launch,
            "nproc": spec.nproc,
            "digest": spec.digest(),
            "master_port": spec.master_port,
            "policy": self._policy.to_wire(),
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
                self.deposits = message.get("deposits") or {}
                if message["error"] is not None:
                    self._verdict = from_wire(message["error"])
                    raise self._verdict
                return
            if kind == "go":
                self._go(message)
            elif kind == "restart":
                self._note_restart(message)
            elif kind == "upload":
                self._on_upload(message["upload"])
            elif kind == "stop" and self._upload is not None:
                if self._upload.vital:
                    self._give_up_upload()
            elif kind == "stop" and self._generation is not None:
                if self._seat.node == CONTROL and message.get("because") and not self._is_told(message["teller"]):
                    self._emit("stopping", f"{message['because']}; stopping all nodes")
                if message.get("evidence") and not self._generation.stopping:
                    self._collect_evidence(self._generation)
                give_up_at = time.monotonic() + self._grace_s + _VERDICT_MARGIN_S
                self._stop("the gang stops", message.get("signal"))
            elif kind == "agent_event":
                self._on_agent_event(message["event"], message["generation"])
                if self._generation is None:
                    give_up_at = None
            elif kind == "abort":
                text = "The step's code has ended while another thread was still in current.torch.run."
                raise self._seat.broken or TorchrunError(text)
            elif kind == "terminated":
                self._preempted()
            elif kind == "timed_out":
                self._timed_out(message["text"])

    def _is_told(self, teller: int) -> bool:
        """Tell whether another node has said in this same terminal why all are stopped."""
        return teller != CONTROL and self._machine.nodes_here > 1

    def _preempted(self) -> None:
        """Tell the gang that this node must end, and go on until its verdict; the second time, end at once."""
        generation, error = self._generation, self._seat.terminated()
        if generation is None or generation.preempted:
            raise error
        generation.preempted = True
        what = Cause.from_wire(error.cause).what if error.cause else str(error)
        self._emit("stopping", f"{what}; stopping all nodes", preempted=True)
        self._tell(error)

    def _timed_out(self, text: str) -> None:
        """Tell the gang that the step's time is up, and go on until its verdict."""
        error = self._seat.timed_out(text)
        if self._generation is None:
            raise error
        self._tell(error)

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
                self._look_around()
                if give_up_at is not None and time.monotonic() > give_up_at:
                    raise TorchrunError(
                        f"The workers of node {self._seat.node} were told to stop but did not end within "
                        f"{self._grace_s + _VERDICT_MARGIN_S:g} s; they may hang in the kernel. Look at the node's devices."
                    ) from None

    # --- one generation -------------------------------------------------------------------------

    def _go(self, message: Message) -> None:
        self._give_up_upload()
        number = int(message["generation"])
        if number == 0:
            self._went_at = time.monotonic()
        try:
            self._start(number, message)
        except Exception as error:  # a full disk, no more processes, a zero byte in a variable
            self._could_not_start(number, error)

    def _could_not_start(self, number: int, error: Exception) -> None:
        self._close(0.0)
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        text = f"its torchrun agent could not be started: {reason}"
        self._emit("worker_failed", f"{text}; stopping all nodes")
        causes = [{"cause": Cause("agent", self._seat.node, self._seat.host, exception=text).to_wire(), "age_s": 0.0}]
        report = {"launch": self._launch, "generation": number, "ok": False, "causes": causes}
        self._seat.send({"type": "ended", **report})

    def _start(self, number: int, message: Message) -> None:
        spec = self._spec
        if self._call is not None:
            self._call.begin()
        folder = self._make_folder(number)
        run_id = f"launch{self._launch}-{number}-{message['gang']}"
        meeting = Rendezvous(self._main_addr, int(message["port"]), run_id, int(message["restarts"]))
        if spec.min_nodes is None:  # the control node's number counts, for all nodes
            spec = replace(spec, max_restarts=int(message["max_restarts"]))
        command = agent_command(spec, meeting, folder)
        # The connection to the others knows best which interface reaches them; a gang of one has none.
        own = message.get("own_address")
        interface = interface_of(own) if own else interface_towards(self._main_addr)
        env = agent_environment(spec, os.environ, omp_threads(self._machine, spec.nproc), interface)
        if self._machine.nodes_here > 1:  # on one terminal
            env = {**env, **SHORT_PEER_ERRORS}
        if self._policy.hang_timeout_s is not None:
            os.makedirs(evidence_folder(folder))
            env.update(hook_environment(evidence_folder(folder), env, str(self._facts.get("torch"))))
        if self._machine.nodes_here > 1 and self._machine.accelerators and "CUDA_VISIBLE_DEVICES" not in dict(spec.env):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._machine.own_accelerators)
        logs = {stream: os.path.join(folder, f"agent.{stream}") for stream in ("stdout", "stderr")}
        try:
            for path in logs.values():
                open(path, "wb").close()
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        own_label, whole = f"[torchrun node {spec.node_index}] ", spec.min_nodes is None  # an elastic agent goes on
        follower = LogFollower(folder, logs, self._label, own_label, self._write, hold_report=whole)
        scratch = [] if spec.log_dir is not None else [folder]
        scratch += [] if self._call is None else [self._call.folder]
        agent = AgentProcess(
            command,
            env,
            logs,
            self._grace_s,
            self._forward(number),
            workers=spec.nproc,
            silence_s=self._silence_s,
            restarts=spec.min_nodes is not None,
            cwd=spec.cwd,
            scratch=scratch,
        )
        self._generation = Generation(spec, self._seat.host, number, folder, command, agent, follower, logs["stderr"])
        self._command = command
        self._emit("command", f"runs: {shown(command)}", command=command)
        follower.start()
        agent.start()

    def _forward(self, generation: int) -> Callable[[dict[str, Any]], None]:
        inbox = self._seat.inbox  # this launch's

        def put(event: dict[str, Any]) -> None:
            inbox.put({"type": "agent_event", "generation": generation, "event": event})

        return put

    def _label(self, local_rank: int) -> str | None:
        shown_ranks = self._spec.shown_local_ranks
        if shown_ranks is not None and local_rank not in shown_ranks:
            return None
        if self._spec.min_nodes is not None:  # torchrun gives ranks out anew at each restart
            return f"[node {self._spec.node_index} local rank {local_rank}] "
        return f"[rank {self._spec.global_rank(local_rank)}] "

    def _make_folder(self, number: int) -> str:
        name = f"torchrun-node{self._spec.node_index}-launch{self._launch}-{number}-"
        if self._spec.log_dir is not None:
            os.makedirs(self._spec.log_dir, exist_ok=True)
        # Relative where the system has no temporary folder but the working one, which can be another for the agent.
        return os.path.abspath(tempfile.mkdtemp(prefix=name, dir=self._spec.log_dir))

    def _on_agent_event(self, event: dict[str, Any], number: int) -> None:
        generation = self._generation
        if generation is None or generation.number != number:
            return
        kind = event["event"]
        if kind == "worker":
            generation.pids[event["rank"]] = event["pid"]
        elif kind == "worker_end":
            self._worker_ended(generation, event)
        elif kind == "worker_reaped":
            generation.reaped[event["local_rank"]] = event["pid"]
            generation.ended_at[event["local_rank"]] = event["t"]
        elif kind == "frozen" and not generation.stopping:
            fault = generation.frozen_cause(event["rank"], event["local_rank"], self._silence_s)
            self._fail_because_of(fault, generation)
        elif kind == "terminated" and not generation.stopping:
            self._fail_because_of(generation.guardian_cause(), generation)
        elif kind == "agent_end":
            self._agent_ended(generation, event)
        elif kind == "end":
            self._generation_ended(generation, event)

    def _worker_ended(self, generation: Generation, event: dict[str, Any]) -> None:
        end = generation.note_end(event)
        self._say_active(generation, event["t"])
        if generation.stopping or self._spec.min_nodes is not None:  # an elastic agent may start them again
            return
        unseen = generation.failed_unseen()
        if unseen is not None:
            self._failed_unseen(generation, unseen)
        elif end.exit_code != 0 and not end.stopped:
            self._fail(generation, f"rank {end.rank} {generation.how_ended(end.exit_code)}", rank=end.rank)

    def _failed_unseen(self, generation: Generation, local_rank: int) -> None:
        generation.reaped_failed = True
        rank = self._spec.global_rank(local_rank)
        self._fail(generation, f"rank {rank} failed", rank=rank)

    def _fail_because_of(self, fault: Cause, generation: Generation) -> None:
        generation.fault = fault
        self._fail(generation, f"{fault.who} {fault.what}")

    def _fail(self, generation: Generation, what: str, **facts: Any) -> None:
        """Report a failure on this node at once and stop its workers."""
        self._emit("worker_failed", f"{what}; stopping all nodes", **facts)
        self._report("failed", generation)
        self._stop(what)

    def _look_around(self) -> None:
        """See what no event tells: failures that only torchrun saw, output, and an upload that takes long."""
        if self._upload is not None:
            self._look_at_upload(self._upload)
        generation = self._generation
        if generation is None or generation.stopping:
            return
        local_rank = generation.failed_unseen() if self._spec.min_nodes is None else None
        if local_rank is not None:
            self._failed_unseen(generation, local_rank)
        elif generation.follower.last_output_at is not None:
            self._say_active(generation, generation.follower.last_output_at)

    def _say_active(self, generation: Generation, at: float) -> None:
        """Tell the gang that a worker has written or ended, unless it knows of something about as recent."""
        limit_s = self._policy.hang_timeout_s
        if limit_s is not None and at > self._said_active_at + limit_s * _ACTIVE_PART:
            self._said_active_at = at
            age = {"age_s": time.monotonic() - at}
            self._seat.send({"type": "active", "launch": self._launch, "generation": generation.number, **age})

    def _agent_ended(self, generation: Generation, event: dict[str, Any]) -> None:
        """The agent ended by itself: fine, or before us it saw a worker fail, or it failed itself."""
        generation.agent_exit = status = event["status"]
        if status != 0 and not generation.stopping:
            generation.add_unseen_ends()
            text = f"{generation.first_failure(status)}; stopping all nodes"
            self._emit("worker_failed", text, exit_code=status)
            self._report("failed", generation, final=True)
            generation.stopped_at = event["t"]

    def _stop(self, why: str, preemption_signal: int | None = None) -> None:
        generation = self._generation
        if generation is not None and not generation.stopping:
            generation.stopped_at = time.monotonic()
            self._emit("stopping", "", why=why)
            if preemption_signal is None:
                generation.agent.stop(self._grace_s)
            else:
                generation.agent.preempt(self._grace_s, preemption_signal)

    def _collect_evidence(self, generation: Generation) -> None:
        """Write down where every worker of this node is, before they are stopped."""
        running = {rank: pid for rank, pid in generation.pids.items() if not generation.has_ended(rank)}
        name = f"node{self._seat.node}-launch{self._launch}-{generation.number}"
        found = collect(running, generation.evidence_folder, self._spec.log_dir, name, EVIDENCE_S)
        self._emit("evidence", f"what the workers were doing:\n{found.text}", file=found.file)
        generation.evidence = {"host": self._seat.host, "file": found.file, "where": found.where}

    def _generation_ended(self, generation: Generation, event: dict[str, Any]) -> None:
        if generation.agent_exit is None:
            generation.agent_exit, generation.error = event["status"], event["error"]
            generation.guardian_exit = event.get("guardian")
        generation.add_unseen_ends()
        generation.close(0.0)
        if event["left"]:
            self._emit("left_behind", f"stopped what the workers had left running: {', '.join(event['left'])}")
        self._exit_codes = {end.rank: end.exit_code for end in generation.ends.values()}
        upload = self._make_upload(generation)
        self._report("ended", generation, final=True, storing=None if upload is None else upload.step.what)
        generation.remove_files()
        self._generation = None
        if upload is not None:
            self._begin_upload(upload, generation.number)

    def _report(self, kind: str, generation: Generation, final: bool = False, storing: str | None = None) -> None:
        message: Message = {"type": kind, "launch": self._launch, "generation": generation.number}
        message["causes"] = first_reported(generation.causes(final))
        if kind == "ended":
            message["ok"] = generation.agent_exit == 0
            message["ended_well"] = sorted(end.rank for end in generation.ends.values() if end.exit_code == 0)
            message["evidence"] = generation.evidence
            message["storing"] = storing
        self._seat.send(message)

    def _ranks(self) -> list[int]:
        return [self._spec.global_rank(local_rank) for local_rank in range(self._spec.nproc)]

    # --- what other nodes need of this node's ranks ---------------------------------------------

    def _make_upload(self, generation: Generation) -> Transfer | None:
        well = generation.agent_exit == 0
        if self._call is None or (well and generation.stopping):
            return None
        return self._call.upload(self._ranks(), self._seat.node, well)

    def _begin_upload(self, upload: Transfer, generation: int) -> None:
        self._upload, self._upload_of = upload, generation
        upload.start(lambda: self._seat.inbox.put({"type": "upload", "launch": self._launch, "upload": upload}))

    def _on_upload(self, upload: Transfer) -> None:
        """It has come to another value, or to its end; one that was given up has no news."""
        if upload is self._upload:
            self._say_storing(upload)
            self._look_at_upload(upload)

    def _look_at_upload(self, upload: Transfer) -> None:
        if upload.over:
            self._upload_ended(upload)
        elif (line := upload.line()) is not None:
            self._emit("note", line)
            self._say_storing(upload)

    def _say_storing(self, upload: Transfer) -> None:
        about = {"launch": self._launch, "generation": self._upload_of}
        self._seat.send({"type": "storing", **about, "what": upload.what()})

    def _upload_ended(self, upload: Transfer) -> None:
        self._give_up_upload()
        stored: Message = {"type": "stored", "launch": self._launch, "generation": self._upload_of, "causes": []}
        problem = upload.problem()
        if problem is not None and upload.vital:
            rank = upload.step.rank or 0
            text = f"has ended well, but {upload.step.what} could not be stored in {upload.where} {problem}"
            local_rank = rank - self._spec.global_rank(0)
            cause = Cause("store", self._seat.node, self._seat.host, rank, local_rank, exception=text)
            self._emit("worker_failed", f"{cause.who} {cause.what}; stopping all nodes", rank=rank)
            stored["causes"] = [{"cause": cause.to_wire(), "age_s": 0.0}]
        self._seat.send({**stored, "keys": dict(upload.results)})

    def _give_up_upload(self) -> None:
        if self._upload is not None:
            self._upload.give_up()
            self._upload = None

    # --- the end --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _clean_up(self) -> Iterator[None]:
        """Whatever ends the launch early: tell the gang first, then stop everything here."""
        try:
            yield
        except BaseException as error:
            self._tell(error, given_up=True)
            self._give_up_upload()
            self._close(self._grace_s)
            # Of whatever generation: others may have begun, or wait for, one that this node knows nothing of.
            self._seat.send({"type": "ended", "launch": self._launch, "ok": False, "causes": [], "given_up": True})
            raise

    def _close(self, grace_s: float) -> None:
        if self._generation is not None:
            generation, self._generation = self._generation, None
            generation.close(grace_s)
            generation.remove_files()

    def _tell(self, error: BaseException, given_up: bool = False) -> None:
        if not self._seat.gang_knows(error):
            causes = [{"cause": self._seat.cause_of(error), "age_s": 0.0}]
            self._seat.send({"type": "failed", "launch": self._launch, "causes": causes, "given_up": given_up})

    def _emit(self, kind: Any, text: str, **facts: Any) -> None:
        self._seat.emit(Event(kind, self._seat.node, text, self._launch, facts))

    def _result(self) -> TorchrunResult[Any]:
        spec = self._spec
        values: Mapping[int, bytes] = {} if self._call is None else self._values(self._call)
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
            values=values,
            gathered=self._call is not None and self._call.gather and self._seat.node == CONTROL,
        )

    def _values(self, call: FunctionCall) -> Mapping[int, bytes]:
        try:
            return call.returned(self._ranks(), self.deposits, lambda line: self._emit("note", line))
        except TransferFailed as error:
            cause = Cause("store", self._seat.node, self._seat.host, exception=f"has no result: {error}")
            text = f"{cause.describe()}\nThe workers of launch {self._launch} had ended well on all nodes."
            raise LaunchFailed(text, cause.to_wire()) from error
