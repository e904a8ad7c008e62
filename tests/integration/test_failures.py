"""One failure anywhere stops every node, soon, with the same words, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from flow_runs import write_flow
from limits import eventually, limit_s

from metaflow_extensions.torchrun.plugins.torchrun.worker.remedies import remedy

# Node 0 has ranks 0 and 1, node 1 has ranks 2 and 3.
TWO = [{"entrypoint": "worker.py", "nproc_per_node": 2}]
# The chaos suite prints how soon all is gone. Here it must be gone before silence would tell of a failure, which it does
# after 30 s (heartbeat_timeout_s).
STOP_S = 30.0


def launch(do, **options):
    """Return one call of `run` whose workers do as told."""
    return {**TWO[0], "env": {"WORKER_DO": do}, **options}


def same_errors(flow, notes="error-*"):
    """Return the error of both nodes, which must be one and the same."""
    errors = flow.notes(notes)
    assert len(errors) == 2, flow.text
    assert len({(e["class"], e["message"]) for e in errors}) == 1, errors
    return errors[0]


# --- one flow whose launches fail in different ways ---------------------------------------------


FAILURES = {
    "exit-code": (2, "exit3", ["Rank 2 on node 1", "exited with code 3", "about to leave", "FileNotFoundError"]),
    "sigkill": (1, "kill", ["Rank 1 on node 0", "killed by SIGKILL: often the out-of-memory killer"]),
    "raise": (3, "raise", ["Rank 3 on node 1", "ValueError: bad löss\nsecond line", "raise ValueError"]),
}


@pytest.fixture(scope="module")
def failing(start_shared_flow):
    """Run a flow in which each launch fails in another way; the last failure ends the flow."""
    runs = [launch(f"*:grumble,{rank}:{action},*:sleep") for rank, action, _ in FAILURES.values()]
    flow = start_shared_flow(runs_=runs, hook="raise-last")
    assert flow.wait() == 1
    flow.await_gone()
    return flow


@pytest.mark.matrix
@pytest.mark.xdist_group("failing")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_worker_is_named_on_every_node(failing, name):
    number, (rank, _, expected) = list(FAILURES).index(name), FAILURES[name]
    error = same_errors(failing, f"error-*.{number}")
    assert error["class"] == "LaunchFailed"
    for words in expected:
        assert words in error["message"]
    assert "host " in error["message"]
    # Each rank has logged an exception, lost a thread and failed when it was told to stop.
    assert ("FileNotFoundError" in error["message"]) is (name != "raise"), "as the end of stderr"
    assert "with FileNotFoundError" not in error["message"]
    assert "interrupted" not in error["message"]
    printed = [line.text.split("[rank 1] ")[1] for line in failing.lines if "[rank 1] " in line.text]
    assert printed.count("last words without newline") == 1
    died = (failing.out / f"worker-launch{number}-0-{rank}").stat().st_mtime  # what it does last before it fails
    assert max(e["at"] for e in failing.notes(f"error-*.{number}")) - died < STOP_S


@pytest.mark.xdist_group("failing")
def test_resume_runs_a_fresh_gang(failing, start_shared_flow):
    flow = start_shared_flow("--origin-run-id", failing.run_id, command="resume")
    assert flow.wait() == 0, flow.text
    assert len(flow.note("end")["tasks"]) == 2


# --- one node whose supervisor is held up while a worker ends, as on a busy machine ----------------


REAPED = {
    "raise": ("1:wait,1:raise,0:sleep", ["ValueError: bad löss"]),
    "exit3-sleep": ("1:wait,1:exit3,0:sleep", ["about to leave", "exited with code 3"]),
    "ended-well": ("0:wait,1:sleep", ["killed by SIGTERM"]),
}
RECORDED, TIMED_OUT = len(REAPED), len(REAPED) + 1


@pytest.fixture(scope="module")
def one_node(start_shared_flow):
    """Run a flow of one node; torchrun reaps a worker of each launch before the supervisor can see it."""
    runs = [launch(do) for do, _ in REAPED.values()]
    runs += [{"entrypoint": "recorded.py", "nproc_per_node": 2}, launch("*:sleep", timeout_s=limit_s(4))]
    flow = start_shared_flow("--nodes", "1", runs_=runs, hook="raise-last", attrs={"grace_s": 2})
    for number, name in enumerate(REAPED):
        workers = {w["env"]["RANK"]: w["pid"] for w in flow.await_notes(f"worker-launch{number}-*", 2)}
        victim = workers["0" if name == "ended-well" else "1"]
        supervisor = psutil.Process(victim).parent().parent()
        supervisor.suspend()
        (flow.out / f"go-launch{number}-0").touch()
        eventually(lambda pid=victim: not psutil.pid_exists(pid), "torchrun has taken its exit code")
        supervisor.resume()
        if name == "ended-well":
            os.kill(workers["1"], signal.SIGTERM)
    assert flow.wait(60) == 1
    flow.await_gone()
    return flow


@pytest.mark.xdist_group("one node")
@pytest.mark.parametrize("name", REAPED)
@pytest.mark.long
def test_a_worker_that_torchrun_reaps_first_is_named_all_the_same(one_node, name):
    """Also where another one has ended well before, unseen."""
    (error,) = one_node.notes(f"error-*.{list(REAPED).index(name)}")
    for words in ["Rank 1 on node 0 (host ", *REAPED[name][1]]:
        assert words in error["message"]
    assert "ChildFailedError" not in one_node.text  # torchrun's own words, where ours say it


@pytest.mark.matrix
@pytest.mark.xdist_group("one node")
def test_a_script_that_uses_record_is_honoured(one_node):
    (error,) = one_node.notes(f"error-*.{RECORDED}")
    assert "RuntimeError: recorded by torchelastic" in error["message"]
    assert "in deep" in error["message"]


@pytest.mark.xdist_group("one node")
def test_timeout_s_stops_the_launch(one_node):
    (error,) = one_node.notes(f"error-*.{TIMED_OUT}")
    assert error["class"] == "LaunchTimeout"
    assert "timeout_s" in error["message"]


# --- what happens to Metaflow's tasks -----------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_an_exception_in_the_steps_own_code(start_flow, node):
    """The other node waits inside of `run`; it is stopped there. The chaos suite has failures after `run`."""
    flow = start_flow(hook=f"before:{node}:raise", stand_in=True)
    assert flow.wait(60) == 1
    assert flow.lines[-1].at - flow.note("failed")["at"] < STOP_S
    flow.await_gone()
    # Said by the node itself and by the other one, whether that had joined by then or not.
    assert f"Node {node} (host" in flow.text
    assert flow.text.count("got SIGTERM") == 0
    assert flow.text.count("ValueError: step code failed before run") >= 2
    assert not re.search("plugins/torchrun|metaflow/cli", flow.text), "its traceback begins with the step's code"


def all_sleep(start_flow, **options):
    flow = start_flow(do="*:sleep", **options)
    flow.await_notes("worker-*", 2)
    return flow


@pytest.mark.parametrize("node", [1, 0])
def test_sigkill_of_a_task_stops_everything(start_flow, node):
    """The chaos suite kills agents and supervisors: there Metaflow makes no difference."""
    flow = all_sleep(start_flow, stand_in=True)
    os.kill(flow.note(f"task-{node}")["pid"], signal.SIGKILL)
    begin = time.monotonic()
    assert flow.wait(60) == 1
    flow.await_gone()
    assert time.monotonic() - begin < STOP_S
    (error,) = flow.errors()
    assert f"Node {node} (host" in error["message"]
    how = r"its task (was killed by SIGKILL|ended unexpectedly)"
    assert re.search(how, error["message"])
    assert re.search(how, flow.ask("show").partition("Timeline")[0])  # of the control node another one tells
    last = [line.text for line in flow.lines if line.stream == "stderr"][-1]
    assert last == f"[torchrun] To see what happened on all nodes: python gang.py torchrun show {flow.run_id}"


def test_sigterm_of_a_task_lets_the_workers_save(start_flow):
    """Each worker, but no process of its own, gets the chosen signal, once, and ends well after it, in its own time."""
    flow = start_flow(runs_=TWO, do="*:save", env={"SAVE_ON": "SIGUSR1"}, attrs={"preemption_signal": "SIGUSR1"})
    flow.await_notes("saves-*", 4)
    os.kill(flow.note("task-0")["pid"], signal.SIGTERM)
    assert flow.wait(60) == 1
    flow.await_gone()
    error = same_errors(flow)
    assert error["class"] == "TorchrunPreempted"
    assert error["cause"]["category"] == "preempted"
    assert "Node 0 (host" in error["message"]
    assert "its Metaflow task got SIGTERM" in error["message"]
    assert "In time, ranks 0, 1, 2, 3 exited with code 0." in error["message"]
    assert [(note["signals"], note["loader"]) for note in flow.notes("saved-*")] == [(1, None)] * 4


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_interrupting_run_leaves_nothing(start_flow, how):
    """Ctrl-C reaches the whole process group, a scheduler's SIGTERM the run alone."""
    flow = all_sleep(start_flow, stand_in=how == "sigterm")
    if how == "ctrl-c":
        os.killpg(flow.process.pid, signal.SIGINT)
    else:
        flow.process.terminate()
    assert flow.wait(60) == 1
    assert "Workflow interrupted" in flow.text
    assert f"python gang.py torchrun show {flow.run_id}\n" in flow.text
    assert "shows the whole error" not in flow.text
    flow.await_gone()
    # What Metaflow kills after 5 s, on a busy machine, records nothing; what is recorded blames nobody's code.
    shown = flow.ask("show", flow.run_id)
    assert "an error in your code" not in shown
    assert "KeyboardInterrupt" not in shown


@pytest.mark.parametrize("hook", ["timeout", "before:1:sleep:timeout"])
def test_metaflows_timeout_stops_the_gang(start_flow, hook):
    """In `run` on both nodes, or on one while the other is late."""
    flow = start_flow(hook=hook, do="*:sleep", stand_in=True)
    assert flow.wait(60) == 1
    flow.await_gone()
    errors = flow.errors()
    assert len(errors) == (1 if "before" in hook else 2)
    assert {(e["class"], e["cause"]["category"]) for e in errors} == {("LaunchTimeout", "timeout")}
    assert "step's @timeout" in errors[0]["message"]
    assert flow.text.count("LaunchTimeout: ") == 2
    assert len(flow.lines) < 40, flow.text


def test_a_node_that_never_arrives_is_named(start_flow):
    flow = start_flow(hook="never-arrives", attrs={"all_nodes_started_timeout": limit_s(3)}, stand_in=True)
    (error,) = flow.await_notes("error-*", 1)
    assert error["class"] == "GangStartTimeout"
    assert "node 1 of 2 did not arrive" in error["message"]
    assert "all_nodes_started_timeout" in error["message"]
    assert flow.wait() == 1
    flow.await_gone()  # the late task, too


def test_a_local_node_that_dies_before_joining_is_noticed_at_once(start_flow):
    flow = start_flow(hook="dies-early", stand_in=True)
    assert flow.wait(40) == 1
    (error,) = flow.errors()
    assert "Node 1" in error["message"]
    assert "exited with code 7" in error["message"]
    assert error["at"] - flow.note("failed")["at"] < STOP_S


def test_retry_sees_nothing_of_the_attempts_before(run_flow):
    """The first one ends by SIGKILL of the control task, before node 1, which it has started, can join it."""
    flow = run_flow(hook="before:0:kill:retry", do="1:once", timeout_s=60, stand_in=True)
    assert re.search(r"node 1\] the control task \(pid \d+\).* gone", flow.text)
    assert len(flow.errors()) == 2
    assert "only the first time" in flow.errors()[0]["message"]
    assert [task["attempt"] for task in flow.note("end")["tasks"]] == [2, 2]
    assert flow.note("end")["tasks"][0]["results"][0]["launch"] == 0


def test_catch_lets_the_flow_go_on(run_flow, tmp_path):
    join = "@step\ndef join(self, inputs):\n    print('CAUGHT', inputs[0].failure.exception)\n    self.next(self.end)\n"
    decorators = '@catch(var="failure")\n    @torchrun'
    write_flow(tmp_path, 'current.torch.run("worker.py")', decorators, head="from metaflow import catch", more=join)
    flow = run_flow(flow="flow.py", folder=tmp_path, do="1:raise", stand_in=True)
    assert re.search(r"CAUGHT .*Rank 1 on node 1", flow.text)
    flow.await_gone()


def test_the_origin_is_named_although_others_fail_faster(run_flow):
    """Real collectives: the peer of the failed rank dies of a broken connection. All is said once, as it was raised."""
    flow = run_flow(expect=1, runs_=[{"entrypoint": "collective.py"}])
    error = same_errors(flow)
    assert "Rank 1 on node 1" in error["message"]
    assert "ValueError: bad loss: *0*  *1 🙂" in error["message"]
    # Its own traceback, with the source line, the report of one node, and the line of the other.
    assert flow.text.count("bad loss: *0*  *1 🙂") == flow.text.count("bad loss") == 4
    assert len(flow.lines) < 40, flow.text
    assert "plugins/torchrun" not in flow.text, "no frame of ours"


# --- what is wrong from the start ---------------------------------------------------------------


PORT = {"attrs": {"master_port": 99999}}
REFUSED = {  # the flow's options, `nproc_per_node` on the command line, and what is said
    "a value": (PORT, 1, ("torchrun:nproc_per_node=1 is ignored", "master_port")),
    "a value on the command line": ({"flow": "plain.py"}, 0, ("Step train: @torchrun(nproc_per_node=...) is 0",)),
    "no num_parallel": ({"flow": "not_parallel.py"}, None, ("num_parallel=2)", "TorchrunSingleNodeMultiGPU")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_attributes_are_refused_before_any_task(name, run_flow):
    """Which values are wrong is a matter of tests/unit/test_settings.py."""
    options, nproc, words = REFUSED[name]
    given = () if nproc is None else ("--with", f"torchrun:nproc_per_node={nproc}")
    flow = run_flow(*given, expect=1, **options)
    assert [word for word in words if word not in flow.text] == []
    assert "Traceback" not in flow.text
    assert "Task is starting" not in flow.text


@pytest.mark.parametrize(
    ("call", "near"), [('"worker.py", nproc=2', "nproc_per_node"), ('"wroker.py"', "worker.py")], ids=["name", "script"]
)
def test_a_typing_mistake_is_said_before_any_task(call, near, start_flow, tmp_path):
    write_flow(tmp_path, f"current.torch.run({call})")
    flow = start_flow(flow="flow.py", folder=tmp_path, stand_in=True)
    assert flow.wait() == 1
    assert f"Did you mean {near}?" in flow.text.partition("Task is starting")[0], flow.text


def test_wrong_calls_have_errors_of_their_own(run_flow):
    wrong = [
        ({"entrypoint": "no such.py"}, "EntrypointError", ["no such.py", "does not exist"]),
        ({}, "EntrypointError", ["entrypoint"]),
        (
            {"entrypoint": "worker.py", "torchrun_args": {"nnodes": 5}},
            "TorchrunConfigError",
            ["nnodes=5", "num_parallel=2"],
        ),
    ]
    flow = run_flow(hook="go-on", runs_=[arguments for arguments, _, _ in wrong], stand_in=True)
    for number, (_, cls, words) in enumerate(wrong):
        error = same_errors(flow, f"error-*.{number}")
        assert error["class"] == cls
        assert all(word in error["message"] for word in words)
    assert not flow.notes("worker-*")
    flow.await_gone()


def test_missing_torch_is_said(run_flow, tmp_path):
    """A Python that has all of ours but torch."""
    import venv

    venv.create(tmp_path / "no torch", with_pip=False, symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for site in {Path(p) for p in sys.path if p.endswith("site-packages")}:
        for entry in site.iterdir():
            if not entry.name.startswith(("torch", "functorch")):
                (packages / entry.name).symlink_to(entry)
    repo = Path(__file__).parents[2]
    python = str(tmp_path / "no torch" / "bin" / "python")
    env = {"PYTHONPATH": os.pathsep.join([str(packages), str(repo)])}
    flow = run_flow(expect=1, python=python, env=env)
    classes = {error["class"] for error in flow.errors()}
    assert "TorchNotFoundError" in classes <= {"TorchNotFoundError", "LaunchFailed"}
    assert "PyTorch is not installed" in flow.text
    assert "pip install torch" in flow.text


LACKED = """
import os, torch
from torch.distributed import init_process_group
asks = [lambda name=name: init_process_group(name) for name in ("mpi", "nccl", "xccl", "ucc", "glo")]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
for ask in [*asks, lambda: torch.zeros(1).cuda(), lambda: torch.zeros(1, device="xpu")]:
    try:
        ask()
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
"""


def test_what_a_pytorch_for_cpus_lacks_has_a_remedy():
    """With one for CUDA it is said in other words, which tests/unit/test_cause.py has."""
    done = subprocess.run([sys.executable, "-c", LACKED], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) >= 4, done.stderr
    assert [line for line in said if not remedy(line)] == []


# --- when nodes do not end alike ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "node", "said"),
    [
        ("artifact", 0, 'failed with UnpicklableArtifactException: Cannot pickle dump artifact named "bad"'),
        ("killed", 0, ""),
        ("killed", 1, ""),
    ],
)
def test_a_failure_after_the_steps_code_is_the_cause_on_the_control_node_and_afterwards(run_flow, hook, said, node):
    flow = run_flow(hook=f"after:{node}:{hook}", expect=1, stand_in=True)
    assert said.partition(": ")[2] in flow.text
    assert "Subprocess failed" not in flow.text
    flow.await_gone()
    shown = flow.ask("show", flow.run_id)
    flow.ask("show", flow.run_id, "--follow", expect=1)
    if hook == "killed" and node == 0:  # nobody is left to record it
        said = "The task of the control node (node 0) has ended, but has not recorded how."
        assert said in flow.text
    assert said in shown
    if hook != "killed":  # whose last words may be unsent
        assert "before its results were stored" in shown
