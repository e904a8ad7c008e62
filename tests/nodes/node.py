"""One node of a gang as a process of its own: what ``@torchrun`` does in a task, without Metaflow's task around it.

Its only argument is a JSON object, which `Gang.start` in ``tests/gangs.py`` makes. What came
of each launch, and of the node itself, is in ``node-N.json``.
"""

import ctypes
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from types import SimpleNamespace

from metaflow.datastore import FlowDataStore
from metaflow.plugins.datastores.local_storage import LocalStorage

from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.gang.view import Presence
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import this_machine
from metaflow_extensions.torchrun.plugins.torchrun.registry import Registry
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import between
from metaflow_extensions.torchrun.plugins.torchrun.task import join as joining
from metaflow_extensions.torchrun.plugins.torchrun.task.cards import Cards
from metaflow_extensions.torchrun.plugins.torchrun.task.gang_store import GangStore
from metaflow_extensions.torchrun.plugins.torchrun.task.join import starts_of

# As the decorator has it, for tasks that are on machines of their own.
HOLD_S = 10.0
DEADLINE_S = 1200.0


def faulty_storage(fault):
    """Return a local datastore whose every call is slow, or fails."""

    def wrapped(method):
        def call(*args, **kwargs):
            time.sleep(2 * (fault == "slow"))
            if fault == "gone":
                raise OSError(5, "the datastore is not there")
            return method(*args, **kwargs)

        return call

    names = ("is_file", "info_file", "size_file", "list_content", "save_bytes", "load_bytes")
    return type("Faulty", (LocalStorage,), {name: wrapped(getattr(LocalStorage, name)) for name in names})


# Makes the control node's supervisor choose a port first that somebody else takes before its agent does.
SQUATTED = """
from torchrun.supervisor import control_side
choose, chosen = control_side.pick_port, []
def pick_port(pinned):
    chosen.append(choose(pinned) if chosen else {squatted})
    return chosen[-1]
control_side.pick_port = pick_port
"""


def take_port_first(squatted):
    before, _, after = between.OURS.partition("from torchrun")
    between.OURS = before + SQUATTED.format(squatted=squatted) + "from torchrun" + after


def fork_when_told(node, out):
    """Fork a child of the step's own while its launch runs; it has all that the task has, but for what it closes."""

    def wait_and_fork():
        while not os.path.exists(os.path.join(out, "fork")):
            time.sleep(0.01)
        if ctypes.PyDLL(None).fork() == 0:  # as a library in C does: our code there does not hear of it
            with open(os.path.join(out, f"forked-{node}.part"), "w") as file:
                file.write(str(os.getpid()))
            os.replace(file.name, os.path.join(out, f"forked-{node}"))
            time.sleep(DEADLINE_S)
            os._exit(0)

    threading.Thread(target=wait_and_fork, daemon=True).start()


STEPS = {
    None: lambda *_: None,
    "ignore-sigchld": lambda *_: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "do-not-block": lambda *_: os.set_blocking(1, False),
    "fork-when-told": fork_when_told,
}


class Notes:
    """What came of this node, for the test to read."""

    def __init__(self, path):
        self._path = path
        self.launches = []
        self._facts = {"launches": self.launches, "error": None}

    def save(self, **facts):
        self._facts.update(facts)
        with open(self._path + ".part", "w") as file:
            json.dump(self._facts, file)
        os.replace(self._path + ".part", self._path)

    @staticmethod
    def of(error):
        return {"class": type(error).__name__, "text": str(error), "cause": getattr(error, "cause", None)}


def join(task, registry, settings, starts):
    """Return this node as a member, the control node's store or None, and the control node's address."""
    if task.node > 0:
        member = joining.begin(task.node, task.num_nodes, settings, {"starts": starts})
        try:
            return member, None, joining.connect(member, registry, settings)
        except BaseException as error:
            member.leave(error)
            raise
    main_ip = task.main_ip
    if main_ip == "own name":  # what Metaflow 2.19 takes for the control node's address on AWS Batch
        main_ip = socket.gethostbyname_ex(socket.gethostname())[-1][0]
    if main_ip is not None:
        joining.refuse_second_run(registry, task.num_nodes)
    token = secrets.token_hex(32)
    member = joining.begin_gang(settings, {"starts": starts}, {}, task.num_nodes, token)
    store = GangStore(member, (), Cards(None), registry)
    try:
        return member, store, joining.open_gang(member, registry, main_ip, settings, token)
    except BaseException as error:
        member.leave(error)
        store.close()
        raise


def await_leave(number, out):
    """Wait until the test wants this launch, or the step's end."""
    deadline = time.monotonic() + DEADLINE_S
    while not os.path.exists(os.path.join(out, f"launch-{number}")):
        assert time.monotonic() < deadline, f"nobody wants launch {number}"
        time.sleep(0.01)


def run_all(executor, task, notes):
    """Run one launch after the other, as a step's code may that catches what `run` raises; raise the last error."""
    error = None
    for number in range(task.launches):
        if number > 0:
            await_leave(number, task.out)
        begun = time.monotonic()
        try:
            result = executor.run(task.entrypoint, **task.options)
            error = None
            notes.launches.append({"restarts": result.restarts, "command": result.command, "nodes": result.nodes})
        except BaseException as caught:
            error = caught
            notes.launches.append(notes.of(caught))
        notes.launches[-1]["seconds"] = time.monotonic() - begun
        notes.save()
    if error is not None:
        raise error


def keep_interpreter(seconds):
    """Make one call that keeps the interpreter for so long: all of it is C code, as in sorting or unpickling."""
    any(map((time.monotonic() + seconds).__lt__, iter(time.monotonic, None)))


def run_own_code(task):
    """Do what a step may do outside of `run`."""
    node, what, out = task.node, task.own_code, task.out
    facts = {}
    if what == "use processes":  # and set SIGTERM back to its default, as a library may
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(abs, [-1, -2])
        facts["child"] = os.fork()
        if facts["child"] == 0:
            time.sleep(DEADLINE_S)
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if what == "one long call":
        begun = time.monotonic()
        keep_interpreter(3 * parse_settings(task.settings, "train").heartbeat_timeout_s)
        facts["seconds"] = time.monotonic() - begun
    Notes(os.path.join(out, f"step-{node}.json")).save(**facts)
    if what == "a call of 15 s":
        Notes(os.path.join(out, f"calls-{node}.json")).save()
        keep_interpreter(15)
    if what == "use processes":
        time.sleep(DEADLINE_S)
    if what and what != "one long call":
        await_leave("end", out)


def main(task):
    time.sleep(task.start_after_s)
    STEPS[task.step](task.node, task.out)
    if task.squatted is not None:
        take_port_first(task.squatted)
    notes = Notes(os.path.join(task.out, f"node-{task.node}.json"))
    # Nodes without hosts of their own are as those of a local run, unless a test asks for all lines.
    settings = parse_settings({**({} if task.main_ip else {"logs": "node"}), **task.settings}, "train")
    storage, folder = faulty_storage(task.datastore), os.path.join(task.out, "datastore")
    member = store = None
    machine = this_machine()
    starts = starts_of(settings, machine, None)
    begun = time.monotonic()
    try:
        flow_datastore = FlowDataStore("ChaosFlow", storage_impl=storage, ds_root=folder)
        registry = Registry(flow_datastore, "1", "train", "1", 0)
        member, store, main_addr = join(task, registry, settings, starts)
        notes.save(join_s=time.monotonic() - begun, main_addr=main_addr)
        executor = TorchrunExecutor(member, main_addr, machine, settings)
        run_own_code(task)
        run_all(executor, task, notes)
        member.finish()
        if store is not None:
            member.await_others(lambda: store.in_state(Presence.HERE))
    except BaseException as error:
        notes.save(error=notes.of(error), seconds=time.monotonic() - begun)
        traceback.print_exc()
        if member is not None:
            member.leave(error, hold_s=0.0 if task.main_ip is None or store is not None else HOLD_S)
        if store is not None:
            store.close()
        return 1
    member.leave(None)
    if store is not None:
        store.close()
    notes.save(ended_well=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(SimpleNamespace(**json.loads(sys.argv[1]))))
