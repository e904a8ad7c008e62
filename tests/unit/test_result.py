"""What `run` returns can be stored, and loaded where the extension is not installed."""

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_result_is_pickled_as_a_plain_namespace(protocol):
    loaded = pickle.loads(pickle.dumps(TorchrunResult(**FIELDS), protocol))
    assert type(loaded) is SimpleNamespace
    assert vars(loaded) == FIELDS


def test_a_result_is_loaded_by_a_python_without_any_package():
    script = "import json, pickle, sys; print(json.dumps(vars(pickle.load(sys.stdin.buffer))))"
    data = pickle.dumps(TorchrunResult(**FIELDS))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], input=data, capture_output=True, check=True)
    assert json.loads(done.stdout) == {**FIELDS, "exit_codes": {"2": 0, "3": 0}}


def test_a_loaded_result_can_be_stored_again():
    once = pickle.loads(pickle.dumps(TorchrunResult(**FIELDS)))
    assert pickle.loads(pickle.dumps(once)) == once
