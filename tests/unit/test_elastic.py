"""torchrun's own elasticity: asked for plainly, refused with reasons, spelled for torchrun."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.elastic import rendezvous_settings, take_min_nodes
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import (
    LaunchSpec,
    Rendezvous,
    Request,
    agent_command,
    build_spec,
)


@pytest.mark.parametrize(
    ("options", "fewest"),
    [
        ({}, None),
        ({"nnodes": "3"}, None),
        ({"nnodes": "3:3"}, None),
        ({"rdzv-backend": "c10d"}, 3),
        ({"rdzv-backend": "c10d", "nnodes": "3"}, 3),
        ({"rdzv-backend": "c10d", "nnodes": "1:3"}, 1),
        ({"rdzv-backend": "c10d", "nnodes": "3:3"}, 3),
    ],
)
def test_only_c10d_makes_a_launch_elastic(options, fewest):
    assert take_min_nodes(options, 3) == fewest
    assert "c10d" not in options.values()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": "1:3"}, ["num_parallel=3", "fixes it", "rdzv_backend='c10d'", "docs/elastic.md"]),
        ({"nnodes": "1:3", "rdzv-backend": "static"}, ["fixes it"]),
        ({"nnodes": "1:4", "rdzv-backend": "c10d"}, ["num_parallel=3", "MIN:3"]),
        ({"nnodes": "4:3", "rdzv-backend": "c10d"}, ["MIN from 1 to 3"]),
        ({"nnodes": "0:3", "rdzv-backend": "c10d"}, ["MIN from 1 to 3"]),
        ({"nnodes": "few:3", "rdzv-backend": "c10d"}, ["few:3"]),
    ],
)
def test_a_size_that_metaflow_cannot_give_is_refused_with_the_reason(options, said):
    with pytest.raises(TorchrunConfigError) as caught:
        take_min_nodes(options, 3)
    for words in said:
        assert words in str(caught.value)


def test_the_control_node_hosts_the_store_and_the_users_settings_stay():
    assert rendezvous_settings(None, True, 90) == "read_timeout=90,join_timeout=90,is_host=true"
    assert rendezvous_settings("join_timeout=7, last_call_timeout=2,is_host=1", False, 90) == (
        "read_timeout=90,join_timeout=7,last_call_timeout=2,is_host=false"
    )


def spec(tmp_path, node, **given) -> LaunchSpec:
    script = tmp_path / "train.py"
    script.touch()
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "max_restarts": 3, **given}
    request = Request(str(script), torchrun_args=options, started_timeout_s=120.0)
    return build_spec(request, nproc=2, num_nodes=2, node_index=node, python="python")


def test_torchrun_restarts_by_itself_then(tmp_path):
    for node, is_host in ((0, "true"), (1, "false")):
        command = agent_command(spec(tmp_path, node), Rendezvous("10.0.0.7", 29500, "run", 0), "/logs")
        for word in (
            "--nnodes=1:2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=10.0.0.7:29500",
            "--max-restarts=3",
            f"--rdzv-conf=read_timeout=120,join_timeout=120,is_host={is_host}",
        ):
            assert word in command
        assert not [word for word in command if "node-rank" in word or "TORCHELASTIC" in word]
        assert command[-2:] == ["--", str(tmp_path / "train.py")]


def test_the_users_rendezvous_settings_are_given_once(tmp_path):
    command = agent_command(spec(tmp_path, 0, rdzv_conf="last_call_timeout=1"), Rendezvous("h", 1, "run"), "/logs")
    (conf,) = [word for word in command if word.startswith("--rdzv-conf")]
    assert "last_call_timeout=1" in conf
