"""Joins the gang before the step's code, and leaves it when the task's results are stored or it has failed.

Everything runs in the task's main thread.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from subprocess import Popen
from typing import Any

from metaflow import current

from ..compat.datastore import save_log, watch_storing
from ..compat.renamed import convenience
from ..compat.steps import forgive_local_nodes, is_local, runs_on, tasks_of_local_nodes
from ..errors import TorchrunError, TorchrunPreempted
from ..events import Event, label
from ..gang.cause import Cause, cause_of
from ..gang.messages import CONTROL
from ..gang.view import Presence, Word
from ..gang.wire import Plain
from ..machine.processes import began, living_descendants, send_signal
from ..machine.streams import is_pipe, unread_bytes
from ..registry import Registry
from ..settings import StepSettings
from ..show.gang_part import GangPart, pointing_at
from ..show.stored_gangs import flow_program
from ..supervisor.endings import NotNeeded
from ..tracebacks import words_of
from .cards import Cards, make_none
from .console import hurry
from .gang_store import GangStore
from .join import NOTHING, begin, begin_gang, connect, open_gang, refuse_second_run
from .member import Member
from .report import end_with, report
from .signs import LOCAL_NODE_MARGIN_S, STARTED_BY, signs
from .task_log import TaskLog
from .transfer import do_within

# How long a failed node holds its end until the control node's log has the cause, and how long that may
# take to upload it: on Kubernetes the first pod that ends takes all with it.
_HOLD_S = 10.0
_UPLOAD_S = 5.0
_POLL_S = 0.25  # between two looks whether local tasks have ended
# Enough to start Python and Metaflow and read one record; less than the 5 s that Metaflow's runtime
# leaves an interrupted task (`_killall` in runtime.py, 2.19).
_LATECOMER_S = 3.0
_SLOW_LATECOMER_S = 10.0  # the same on a busy machine, where nobody has ordered this task to end


class TaskGang:
    """The gang of one attempt of a step, as one of its tasks sees it."""

    def __init__(
        self,
        settings: StepSettings,
        flow_datastore: Any,  # metaflow.datastore.FlowDataStore
        task: tuple[str, str, str, int],  # run, step, task and attempt
        limit: Mapping[str, Any] = NOTHING,
        forget: Callable[[Sequence[int]], object] = len,
    ) -> None:
        self._forget = forget  # has Metaflow's join not wait for the tasks of some nodes
        self._settings, self._flow_datastore, self._task = settings, flow_datastore, task
        self._limit = limit  # on a control node, the rules for the step's @timeout: see `step_timeout`
        self._is_local = is_local()
        self._log = TaskLog(partial(save_log, flow_datastore, task))
        self._member: Member | None = None
        self._is_control = False  # of several nodes
        self._store: GangStore | None = None  # on any control node
        self._save_word: Callable[[Word], None] | None = None  # on node 1: tells how the control node has ended
        self.part: Callable[[tuple[str, ...]], GangPart] | None = None  # see `TorchrunExecutor`
        self._is_incomplete = False  # whether the gang has ended well without some nodes

    # --- before the step's code -----------------------------------------------------------------

    def join(self, tasks: Sequence[str] = (), starts: Plain | None = None) -> tuple[Member, str]:
        """Join, and return this node as a member and the control node's address.

        `tasks` are those of all nodes, in order, each as run, step and task. `starts` is for `supervisor.warm`.
        """
        parallel, settings, here_only = current.parallel, self._settings, self._is_local
        local_node = parallel.node_index if here_only else None
        looks = signs(os.environ, settings.grace_s, current.get("spot_termination_notice"), local_node)
        more = {"starts": starts, "signs": looks}
        # Meant for tasks alone, neither for spares nor for what the step's code starts.
        os.environ.pop(STARTED_BY, None)
        num_nodes = parallel.num_nodes
        run_id, step_name, task_id, attempt = self._task
        control = (run_id, step_name, parallel.control_task_id or task_id)
        registry = Registry(self._flow_datastore, *control, attempt)
        if parallel.node_index > 0:
            self.part = pointing_at("/".join(control))
            make_none()  # the control node makes the gang's card
            member = self._member = begin(parallel.node_index, num_nodes, settings, more)
            member.save_log = self._log.save
            self._save_word = partial(registry.save_word, who="member") if parallel.node_index == 1 else None
            return member, connect(member, registry, settings)
        stacks = f"{flow_program()} torchrun stacks {run_id}/{step_name}"
        rules = {"replaces": self._replaces, "stacks": stacks, **self._limit}
        main_ip = None if here_only else parallel.main_ip
        if main_ip is not None:  # there the same task can be run again by hand
            refuse_second_run(registry, num_nodes)
        token = secrets.token_hex(32)
        member = self._member = begin_gang(settings, more, rules, num_nodes, token)
        member.save_log = self._log.save
        self._is_control, cards = num_nodes > 1, Cards(self._flow_datastore)
        self._store, self.part = GangStore(member, tasks, cards, registry), cards.part
        main_addr = open_gang(member, registry, main_ip, settings, token)
        nodes = enumerate(tasks_of_local_nodes(), 1)
        member.link.send("follow", [[node, task.pid, began(task.pid)] for node, task in nodes])
        return member, main_addr

    @property
    def _replaces(self) -> bool:
        """Whether Kubernetes brings tasks again, and ends all pods with the control node's: see `compat.jobs`."""
        return runs_on() == "kubernetes" and self._settings.replaces_nodes

    # --- around it and after it -----------------------------------------------------------------

    def run(self, step: Callable[[], None]) -> None:
        """Run the step, which joins; leave if it fails."""
        signal.alarm(0)  # Metaflow's, for the step's @timeout, which the gang enforces
        try:
            step()
        except BaseException as error:
            member = self._member
            if member is not None and member.is_forked:
                raise  # a child that the step has forked and that went on with the step's code
            if is_ordered := self._was_told_to_end(error):
                hurry()
            if member is not None:
                member.fail(in_hurry=is_ordered)
            self._report_and_leave(error)
            if tasks := tasks_of_local_nodes(error):
                absent = () if self._store is None else self._store.in_state(Presence.ABSENT, Presence.OUT)
                # After an order to end, this task waits for no reader, and so the others can't.
                stop_local_nodes(tasks, self._settings.grace_s + LOCAL_NODE_MARGIN_S, absent, is_ordered)
            raise

    @staticmethod
    def _was_told_to_end(error: BaseException) -> bool:
        """Return whether this task itself got a signal to end, as by Ctrl-C."""
        cause = cause_of(error) if isinstance(error, TorchrunPreempted) else None
        is_own = cause is not None and cause.node == current.parallel.node_index
        return is_own or isinstance(error, KeyboardInterrupt)

    def run_code(self, step: Callable[[], None]) -> None:
        """Run the step's own code, and report that it has ended well. On the control node, wait until all others have left.

        Where this node was dismissed meanwhile, each exception is such an end: its results are nobody's.
        """
        try:
            step()
        except (Exception, NotNeeded) as error:
            if self._member is None or not self._member.is_dismissed:
                raise
            is_own = isinstance(error, NotNeeded)
            text = f"{error}" if is_own else f"not needed any more; its step's code raised {words_of(error)}"
            self._member.note(text, is_detail=is_own and self._is_local)
        if self._member is not None:
            self._member.finish()
            if self._is_control and self._store is not None:
                self._await_others(self._member, self._store)

    def _await_others(self, member: Member, store: GangStore) -> None:
        # On AWS Batch the control node's end stops all nodes, and nothing else makes another node's failure the run's
        # (Metaflow 2.19 waits there for the others' ends only). On a local run Metaflow waits next, for one after the other.
        member.await_others(partial(store.in_state, Presence.HERE, Presence.ABSENT))
        if out := store.in_state(Presence.OUT):
            self._is_incomplete = True
            self._forget(out)
            forgive_local_nodes(out)  # those that do not end are killed by our supervisor

    def fail(self, error: BaseException) -> None:
        """Report an error after the step's code, and leave with it; nothing if the node has left."""
        if self._member is not None and self._member.is_storing:
            self._report_and_leave(error)

    def _report_and_leave(self, error: BaseException) -> None:
        with convenience("our own report of the error"):
            self._report(error)
        self.leave(error)

    def leave(self, error: BaseException | None) -> None:
        """Leave for good; nothing the second time, and in a fork of the task."""
        member, self._member = self._member, None
        if member is None or member.is_forked:
            return
        if self._replaces and not self._is_control:  # else the last lines could be missing
            self._log.save(_UPLOAD_S)
        cause = cause_of(error) if isinstance(error, TorchrunError) else None
        if self._save_word is not None and cause is not None and (cause.kind, cause.node) == ("lost", CONTROL):
            word = Word(str(error), time.time(), member.num_nodes, type(error).__name__)
            do_within(partial(self._save_word, word), _UPLOAD_S)
        member.leave(error, hold_s=0.0 if self._is_local or self._is_control else _HOLD_S)
        if self._store is not None:
            self._store.close(error)

    def watch_storing(self, task_datastore: Any) -> None:
        """Leave when all is stored, or report that it can't be: Metaflow calls no decorator after that (task.py, 2.19).

        Metaflow makes its last card after that, which so shows the gang's end.
        """
        watch_storing(task_datastore, self._or_fail)

    def _or_fail(self, is_last: bool, store: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = store(*args, **kwargs)
        except Exception as error:
            self.fail(error)
            raise
        if is_last:
            self.leave(sys.exc_info()[1])  # what Metaflow hands to no decorator, such as SystemExit, is on its way
        if is_last and self._is_incomplete:
            # All is stored, also which tasks the join takes. On AWS Batch Metaflow still waits until the step has as many
            # tasks, all finished, as are listed now (`BatchDecorator._wait_for_mapper_tasks`, 2.19). One would never be.
            self._forget(range(1, current.parallel.num_nodes))
        return result

    def _report(self, error: BaseException) -> None:
        """Set the text to print for the error; a remote control node writes it to its log at once.

        Metaflow prints it only after storing all artifacts, which can be too late there.
        """
        node, member, is_local = current.parallel.node_index, self._member, self._is_local
        # On Kubernetes the others' ends may soon take this task with them; an order to end leaves less time.
        if member is not None and not self._was_told_to_end(error):
            member.store_now()

        def stands_above(cause: Cause) -> bool:  # lines of other nodes may be left out here
            return member is not None and member.shows_output and (is_local or cause.node == node)

        text = report(error, node, is_local, member is not None and member.gang_knows(error), stands_above)
        if text is not None and member is not None and self._is_control and not is_local:
            member.say(Event("failed", node, text))
            member.link.settle(_UPLOAD_S)
            self._log.save(_UPLOAD_S)
            text = f"{type(error).__name__}: see the error of {label(node, current.parallel.num_nodes)}above."
        end_with(error, text)


# --- the other nodes' tasks on a local run ----------------------------------------------------------
# Metaflow's control task starts them as its children (`compat.steps.tasks_of_local_nodes`). It does not look at them while
# its own step runs, and it does not stop them when that fails (2.19).


def stop_local_nodes(
    tasks: Sequence[Popen[bytes]], wait_s: float, absent: Collection[int], is_ordered: bool = False
) -> None:
    """Wait until the tasks of the nodes from 1 on have ended; after `wait_s` seconds kill them.

    Where their output waits for its reader, the time does not count, unless this task was ordered to end (`is_ordered`).
    An `absent` one has not joined the gang, or is lost, and has a moment: if it is just starting, it finds how the gang has
    ended, and ends by itself.
    """
    latecomer_s = min(wait_s, _LATECOMER_S if is_ordered else _SLOW_LATECOMER_S)
    late = [task for node, task in enumerate(tasks, 1) if node in absent]
    # In this order: who waits for a lost node's turn has all its time when that node is gone.
    _end(late, latecomer_s, waits_for_reader=False)
    _end([task for task in tasks if task not in late], wait_s, waits_for_reader=not is_ordered)


def _end(tasks: Sequence[Popen[bytes]], wait_s: float, waits_for_reader: bool) -> None:
    """Wait until `tasks` have ended; kill those that run after `wait_s` seconds, with all that they have started."""
    deadline = time.monotonic() + wait_s
    while (left := [task for task in tasks if task.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if waits_for_reader and any(is_pipe(fd) and unread_bytes(fd) for fd in (1, 2)):
            deadline = time.monotonic() + wait_s
    for pid in [pid for task in left for pid in [*living_descendants(task.pid), task.pid]]:
        send_signal(pid, signal.SIGKILL)
