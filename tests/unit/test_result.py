"""What `run` returns: values of ranks, and an artifact that loads where the extension is not installed."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from unit_helpers import write

import metaflow_extensions.torchrun as ours
from metaflow_extensions.torchrun.plugins.torchrun.result import TorchrunResult

FIELDS = {
    "launch": 1,
    "num_nodes": 2,
    "node_index": 1,
    "nproc_per_node": 2,
    "world_size": 4,
    "command": "python -m torch.distributed.run -- 'größe $HOME.py'",
    "restarts": [{"generation": 1, "cause": {"kind": "exit", "exit_code": 3}}],
    "duration_s": 1.5,
    "exit_codes": {2: 0, 3: 0},
}
VALUES = {2: pickle.dumps({"loss": 0.5}), 3: pickle.dumps(None)}
OF_FUNCTION = TorchrunResult(**FIELDS, values=VALUES)
OF_SCRIPT = TorchrunResult(**FIELDS)
# Two of four values; the others are missing and must not be left out.
PART = TorchrunResult(
    **{**FIELDS, "node_index": 0, "exit_codes": {0: 0, 1: 0}}, values={0: VALUES[2], 1: VALUES[3]}, gathered=True
)


# --- values ---------------------------------------------------------------------------------------


def test_values_are_found_by_rank_and_local_rank_and_in_order():
    OF_FUNCTION.rank(2)["loss"] = 9  # of a value of its own
    assert OF_FUNCTION.rank(2) == OF_FUNCTION.local_rank(0) == {"loss": 0.5}
    assert OF_FUNCTION.rank(3) is OF_FUNCTION.local_rank(1) is None
    assert list(OF_FUNCTION) == [{"loss": 0.5}, None]
    behind_a_lost_node = replace(OF_FUNCTION, node_index=2, nodes=(0, 2))
    assert behind_a_lost_node.local_rank(0) == {"loss": 0.5}


def test_iteration_gives_all_ranks_if_they_were_gathered_else_this_nodes():
    values = {rank: pickle.dumps(rank) for rank in range(4)}
    gathered = TorchrunResult(**{**FIELDS, "node_index": 0}, values=values, gathered=True)
    assert list(gathered) == [0, 1, 2, 3]
    assert [gathered.local_rank(rank) for rank in range(2)] == [0, 1]
    assert (len(gathered), len(OF_FUNCTION), len(OF_SCRIPT)) == (4, 2, 0)
    assert (list(OF_SCRIPT), bool(OF_SCRIPT)) == ([], True)


@pytest.mark.parametrize(
    ("result", "look", "words"),
    [
        (OF_FUNCTION, lambda r: r.rank(0), ["of node 1", "values of ranks 2, 3, not of 0", "gather=True"]),
        (OF_FUNCTION, lambda r: r.rank(4), ["no rank 4", "0 to 3"]),
        (OF_FUNCTION, lambda r: r.local_rank(2), ["no local rank 2", "0 to 1"]),
        (OF_SCRIPT, lambda r: r.rank(2), ["Rank 2 returned no value", "a script has none"]),
        (PART, list, ["Rank 2 returned no value"]),
        (TorchrunResult(**FIELDS, values={2: VALUES[2]}), lambda r: r.rank(3), ["Rank 3", "sys.exit()"]),
    ],
)
def test_a_value_that_is_not_there_says_why(result, look, words):
    with pytest.raises(LookupError) as caught:
        look(result)
    assert all(word in str(caught.value) for word in words), caught.value


def test_values_that_were_lost_with_a_task_are_no_empty_list():
    """That of a node whose task was lost after the launch; another task has called `run` for it."""
    result = replace(OF_FUNCTION, values={}, exit_codes={}, nodes=(0, 1))
    for look in (list, len, lambda result: result.rank(2), lambda result: result.local_rank(0)):
        with pytest.raises(LookupError, match=r"node 1 .* was lost, and what .* gather=True"):
            look(result)
    script = replace(result, has_values=False)
    assert (list(script), len(script)) == ([], 0)
    with pytest.raises(LookupError, match="a script has none"):
        script.rank(2)


def test_a_result_is_printed_in_one_line():
    assert repr(OF_FUNCTION) == "<TorchrunResult: launch 1, 4 ranks on 2 nodes, 2 s, 1 restart, 2 values>"
    assert repr(replace(OF_SCRIPT, restarts=[], nodes=(1,), world_size=1)).endswith("1 rank on 1 node, 2 s>")


# --- as an artifact ---------------------------------------------------------------------------------


def test_a_result_is_stored_and_loaded_as_what_it_is():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(OF_FUNCTION, protocol)), protocol)) == OF_FUNCTION


READ = (
    "import json, pickle, sys; r = pickle.load(sys.stdin.buffer); values = r.__dict__.pop('values')\n"
    "print(json.dumps([type(r).__name__, {k: pickle.loads(v) for k, v in values.items()}, vars(r)]))"
)


def read(*python, path=""):
    """Return what another Python makes of a result: its class, its values, the rest."""
    env = {**os.environ, "PYTHONPATH": str(path), "METAFLOW_USER": "tester"}
    data = pickle.dumps(OF_FUNCTION)
    done = subprocess.run([*python, "-c", READ], input=data, capture_output=True, env=env, cwd=path or None)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


# As JSON has it.
OTHERS = {name: value for name, value in vars(OF_FUNCTION).items() if name != "values"}
PLAIN = ["SimpleNamespace", {"2": {"loss": 0.5}, "3": None}, json.loads(json.dumps(OTHERS))]


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([], id="nothing"),
        pytest.param(["metaflow_extensions/other/plugins/__init__"], id="another-extension"),
        pytest.param(  # as metaflow-torchrun 0.2 is laid out: the same package with other modules
            ["metaflow/__init__", *(f"metaflow_extensions/torchrun/{name}__init__" for name in ("", "plugins/"))],
            id="another-version",
        ),
    ],
)
def test_a_python_without_this_extension_gets_a_plain_namespace(modules, tmp_path):
    for module in modules:
        write(tmp_path / f"{module}.py", "")
    assert read(sys.executable, "-S", path=tmp_path) == PLAIN


def test_a_python_with_this_extension_but_no_metaflow_gets_a_plain_namespace(tmp_path):
    (tmp_path / "metaflow_extensions").symlink_to(Path(next(iter(ours.__path__))).parent)
    assert read(sys.executable, "-S", path=tmp_path) == PLAIN
