"""The argv and the environment of an agent."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Go
from metaflow_extensions.torchrun.plugins.torchrun.machine.accelerators import Machine
from metaflow_extensions.torchrun.plugins.torchrun.supervisor import command
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call

GO = Go(launch=0, generation=0, port=29512, gang="gang", max_restarts=0)
CALL = Call(
    "/flow/train.py", (), False, nproc=2, num_nodes=3, node_index=1, python="/usr/bin/python3", main_addr="10.0.0.7"
)


def command_of(go=GO, **changes):
    return command.agent_command(replace(CALL, **changes), go, "/my logs", "/my pipes")


def program_of(**changes):
    """Return what torch's elastic agent makes of a worker's words (torch/distributed/elastic/utils/api.py, 2.13)."""
    command = command_of(**changes)
    words = command[command.index("--") + 1 :]
    return [string.Template(word).safe_substitute(local_rank="7") for word in words]


# --- the command ---------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet=st.sampled_from("$${}local_rank -x'\"\\é")), max_size=5))
def test_torchruns_template_gives_back_every_argument(args):
    assert program_of(args=tuple(args)) == ["/flow/train.py", *args]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entrypoint": "package.train", "module": True}, ["--module", "--", "package.train"]),
        ({"main_addr": "fd00::7"}, ["--rdzv-endpoint=[fd00::7]:29512"]),
        ({"options": {"rdzv-id": "mine"}}, ["--rdzv-id=mine"]),
        ({"options": {"rdzv-id": ""}}, ["--rdzv-id=launch0-0-gang"]),
        ({"options": {"brand-new": "a b", "new-flag": None}}, ["--brand-new=a b", "--new-flag"]),
    ],
)
def test_what_the_user_says_is_passed_on(changes, words):
    command = command_of(**changes)
    assert set(words) < set(command)
    assert len([word for word in command if word.startswith("--rdzv-id")]) == 1


# --- the environment -----------------------------------------------------------------------------


def environment_of(inherited, interface=None, **env):
    return command.with_hooks(command.command_environment(Machine(6), 1, env, inherited, interface), None)


THREADS = {"OMP_NUM_THREADS": "6", "PYTHONUNBUFFERED": "1"}
DEFAULTS = {**THREADS, "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
HOOK = {"PYTHONPATH": f"{command.WORKER_HOOKS}:{command.IMPORTABLE}"}


@pytest.mark.parametrize(("logs", "hides"), [("node", False), ("all", False), ("rank0", True)])
def test_workers_know_where_some_ranks_are_not_shown(logs, hides):
    assert ("TORCHRUN_HIDES" in command.agent_environment(replace(CALL, logs=logs), GO, None)) is hides


def test_variables_of_an_outer_torchrun_are_dropped_and_those_that_look_alike_kept():
    outer = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES"]
    kept = {"MY_RANK": "1", "PETS": "2", "RANKS": "3", "TORCH_HOME": "/t", "PATH": "/bin"}
    inherited = {**dict.fromkeys(outer, "5"), **kept, "TORCHRUN_AGENT_PID": "7", "TORCHRUN_RESTARTS": "1/3"}
    before = dict(inherited)
    assert environment_of(inherited, "eth0") == {**kept, **DEFAULTS, **HOOK}
    assert inherited == before


def test_defaults_fill_what_is_not_set():
    assert environment_of({}, "eth0") == {**DEFAULTS, **HOOK}
    assert environment_of({}) == {**THREADS, **HOOK}
    for value in ("mine", ""):
        own = dict.fromkeys(DEFAULTS, value)
        assert environment_of(own, "eth0") == {**own, **HOOK}
        assert environment_of({"PATH": "/bin", "MASTER_ADDR": "x"}, "eth0", **own, PATH="") == {
            **own,
            **HOOK,
            "PATH": "",
        }


def test_our_hooks_are_first_on_the_path_and_what_it_may_import_is_last_and_no_working_directory_is():
    path = environment_of({"PYTHONPATH": "/task"}, PYTHONPATH="/mine:/too")["PYTHONPATH"]
    assert path == f"{command.WORKER_HOOKS}:/mine:/too:{command.IMPORTABLE}"
    assert environment_of({"PYTHONPATH": ""})["PYTHONPATH"] == f"{command.WORKER_HOOKS}:{command.IMPORTABLE}"
