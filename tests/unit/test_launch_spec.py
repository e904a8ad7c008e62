"""Arguments in, argv and environment out."""

import copy
import json
import os
import shlex
import string
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import HOSTILE, write

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.launch_spec import (
    WORKER_HOOKS,
    LaunchSpec,
    Rendezvous,
    Request,
    agent_command,
    agent_environment,
    build_spec,
    entrypoint_arguments,
    parse_port,
    shown,
    torchrun_options,
)

MEETING = Rendezvous("10.0.0.7", 29512, "launch0-0")


def spec_of(**changes):
    base = LaunchSpec("/flow/train.py", (), False, nproc=2, num_nodes=3, node_index=1, python="/usr/bin/python3")
    return replace(base, **changes)


@pytest.fixture
def script(tmp_path):
    return str(write(tmp_path / "train.py", ""))


def build(entrypoint, num_nodes=2, node_index=1, nproc=2, main_addr=None, **request):
    node = {
        "num_nodes": num_nodes,
        "node_index": node_index,
        "nproc": nproc,
        "python": "python3",
        "main_addr": main_addr,
    }
    return build_spec(Request(entrypoint, **request), **node)


# --- entrypoint_args ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ("--key",)),
        ("", ("--key",)),
        (True, ("--key", "true")),
        (False, ("--key", "false")),
        (0, ("--key", "0")),
        (0.1, ("--key", "0.1")),
        (1e-05, ("--key", "1e-05")),
        ([1, "a"], ("--key", '[1, "a"]')),
        ((1, None), ("--key", "[1, null]")),
        ([], ("--key", "[]")),
        ({"a": {"b": 'say "hi"'}}, ("--key", '{"a": {"b": "say \\"hi\\""}}')),
        (["größe"], ("--key", '["größe"]')),
        (Path("/a b"), ("--key", "/a b")),
    ],
)
def test_a_dict_of_arguments_becomes_options(value, words):
    assert entrypoint_arguments({"key": value}) == words


@pytest.mark.parametrize("key", ["-k", "--key", "--key=x"])
def test_a_key_that_has_its_dashes_keeps_them(key):
    assert entrypoint_arguments({key: 1}) == (key, "1")


@pytest.mark.parametrize("text", [text for text in HOSTILE if text])
def test_a_hostile_value_arrives_unchanged(text):
    assert entrypoint_arguments({"k": text}) == ("--k", text)


def test_a_nested_value_survives_json():
    nested = {text: [text, {"deep": text}] for text in HOSTILE}
    assert json.loads(entrypoint_arguments({"k": nested})[1]) == nested


def test_the_order_of_arguments_is_kept():
    assert entrypoint_arguments({"b": 1, "a": 2, "flag": None}) == ("--b", "1", "--a", "2", "--flag")


def test_a_list_is_passed_as_it_is():
    assert entrypoint_arguments(HOSTILE) == tuple(HOSTILE)
    assert entrypoint_arguments(("--n", 3, 0.5)) == ("--n", "3", "0.5")


@pytest.mark.parametrize("nothing", [None, {}, [], ()])
def test_no_arguments_are_none(nothing):
    assert entrypoint_arguments(nothing) == ()


@pytest.mark.parametrize("wrong", ["--lr 0.1", b"--lr", 3, {1, 2}])
def test_another_form_of_arguments_is_refused(wrong):
    with pytest.raises(TorchrunConfigError, match=r"entrypoint_args is a .* dict .* or a list"):
        entrypoint_arguments(wrong)


@pytest.mark.parametrize("wrong", [{"k": "a\0b"}, {"a\0b": 1}, ["a\0b"]])
def test_a_nul_character_is_refused(wrong):
    with pytest.raises(TorchrunConfigError, match="NUL"):
        entrypoint_arguments(wrong)


def test_a_value_that_json_can_not_hold_is_named():
    with pytest.raises(TorchrunConfigError, match=r"entrypoint_args\['when'\]"):
        entrypoint_arguments({"when": [object()]})


def test_the_callers_arguments_are_never_changed():
    arguments = {"a": [1, {"b": None}], "flag": None, "text": "$HOME"}
    before = copy.deepcopy(arguments)
    entrypoint_arguments(MappingProxyType(arguments))
    assert arguments == before


# --- torchrun_args -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        {"max_restarts": 3},
        {"max-restarts": "3"},
        {"--max-restarts": 3},
        {"--max_restarts": 3},
        {"max_restarts": 3, "max-restarts": "3"},
        ["--max-restarts=3"],
        ["--max_restarts=3"],
        ["--max-restarts", "3"],
        ["max-restarts", "3"],
        ["max_restarts", 3],
        ("--max-restarts=3", "--max_restarts", "3"),
    ],
)
def test_all_spellings_of_an_option_mean_the_same(spelling):
    assert torchrun_options(spelling) == {"max-restarts": "3"}


@pytest.mark.parametrize(
    "spelling",
    [
        {"no_python": None},
        {"no-python": ""},
        {"no_python": True},
        ["--no-python"],
        ["no_python", ""],
        ["no-python", None],
    ],
)
def test_all_spellings_of_a_flag_mean_the_same(spelling):
    assert torchrun_options(spelling) == {"no-python": None}


def test_a_flag_that_is_false_is_absent():
    assert torchrun_options({"no_python": False, "module": False}) == {}


def test_the_alternating_list_of_0_2_is_understood():
    given_list = ["--standalone", "", "max-restarts", "3", "module", None, "rdzv_id", "a b"]
    assert torchrun_options(given_list) == {"standalone": None, "max-restarts": "3", "module": None, "rdzv-id": "a b"}


def test_a_flag_does_not_swallow_the_next_option():
    assert torchrun_options(["--no-python", "--max-restarts=3"]) == {"no-python": None, "max-restarts": "3"}


def test_a_flag_of_a_newer_torch_does_not_swallow_the_next_option():
    assert torchrun_options(["--brand-new", "--max-restarts=3"]) == {"brand-new": None, "max-restarts": "3"}


@pytest.mark.parametrize(
    ("short", "option"), [("-m", {"module": None}), ("-r=3", {"redirects": "3"}), ("-t=1", {"tee": "1"})]
)
def test_short_names_are_known(short, option):
    assert torchrun_options([short]) == option


def test_an_equals_sign_may_stand_in_a_value():
    assert torchrun_options(["--rdzv-conf=a=1,b=2"]) == {"rdzv-conf": "a=1,b=2"}


@pytest.mark.parametrize(
    "twice",
    [["--max-restarts=3", "--max_restarts=4"], {"max_restarts": 3, "max-restarts": 4}, ["-t=1", "tee", "2"]],
)
def test_an_option_with_two_values_is_refused_with_both(twice):
    with pytest.raises(TorchrunConfigError, match=r"twice: '\d' and '\d'"):
        torchrun_options(twice)


@pytest.mark.parametrize("wrong", ["--max-restarts=3", 3, b"x"])
def test_another_form_of_torchrun_args_is_refused(wrong):
    with pytest.raises(TorchrunConfigError, match="torchrun_args is a"):
        torchrun_options(wrong)


def test_an_option_at_the_end_without_value_is_named():
    with pytest.raises(TorchrunConfigError, match="option role has no value"):
        torchrun_options(["--role"])


def test_an_empty_word_for_an_option_is_refused():
    with pytest.raises(TorchrunConfigError, match="empty word"):
        torchrun_options(["", "3"])


def test_a_flag_with_a_value_is_refused():
    with pytest.raises(TorchrunConfigError, match="flag without a value"):
        torchrun_options({"standalone": "yes"})


@pytest.mark.parametrize(
    "mine", [{"max_restarts": 3, "flag": None, "nested": ["x"]}, ["--standalone", "", "max-restarts", "3"]]
)
def test_the_callers_torchrun_args_are_never_changed(mine, script):
    before = copy.deepcopy(mine)
    torchrun_options(mine)
    build(script, num_nodes=1, node_index=0, torchrun_args=mine)
    assert mine == before


# --- build_spec: contradictions ----------------------------------------------------------------


@pytest.mark.parametrize(
    "agreeing",
    [
        {"nnodes": 2},
        {"nnodes": "2"},
        {"nnodes": "2:2"},
        {"node_rank": 1},
        {"node-rank": "1"},
        {"rdzv_backend": "static"},
    ],
)
def test_what_the_gang_does_anyway_may_be_said(agreeing, script):
    assert build(script, torchrun_args=agreeing).options == ()


@pytest.mark.parametrize(
    ("option", "value", "other"),
    [
        ("nnodes", 3, "num_parallel=2"),
        ("nnodes", "1:2", "num_parallel=2"),
        ("node_rank", 0, "node_index=1"),
        ("master_addr", "10.1.2.3", "control node"),
        ("rdzv_backend", "etcd", "static"),
        ("rdzv_endpoint", "host:1234", "control node"),
    ],
)
def test_what_contradicts_the_gang_is_refused_with_both_named(option, value, other, script):
    with pytest.raises(TorchrunConfigError) as caught:
        build(script, torchrun_args={option: value})
    assert f"{option.replace('_', '-')}={value}" in str(caught.value)
    assert other in str(caught.value)


def test_the_gangs_own_address_may_be_repeated(script):
    spec = build(script, main_addr="10.0.0.7", torchrun_args={"master_addr": "10.0.0.7"})
    assert spec.options == ()
    spec = build(script, main_addr="10.0.0.7", torchrun_args={"rdzv_endpoint": "10.0.0.7:3339"})
    assert (spec.options, spec.master_port) == ((), 3339)


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"])
def test_the_gangs_own_ipv6_address_may_be_repeated_with_brackets_and_without(address, script):
    spec = build(script, main_addr="fd00::7", torchrun_args={"master_addr": address})
    assert spec.options == ()
    spec = build(script, main_addr="fd00::7", torchrun_args={"rdzv_endpoint": f"{address}:3339"})
    assert (spec.options, spec.master_port) == ((), 3339)
    with pytest.raises(TorchrunConfigError, match="contradicts the control node's address"):
        build(script, main_addr="fd00::7", torchrun_args={"rdzv_endpoint": "[fd00::8]:3339"})


@pytest.mark.parametrize("given", [["max-restarts", ""], {"max_restarts": None}, {"log-dir": ""}])
def test_an_option_without_its_value_is_refused(given):
    with pytest.raises(TorchrunConfigError, match="needs a value"):
        torchrun_options(given)


def test_standalone_is_fine_for_one_node_and_refused_for_more(script):
    assert build(script, num_nodes=1, node_index=0, torchrun_args=["--standalone"]).options == ()
    with pytest.raises(TorchrunConfigError, match=r"standalone contradicts num_parallel=2"):
        build(script, torchrun_args=["--standalone"])


def test_nproc_twice_and_equal_is_fine():
    request = Request("x", nproc_per_node="2", torchrun_args={"nproc_per_node": 2})
    assert request.nproc_settings() == [("run(nproc_per_node)", 2), ("torchrun_args nproc-per-node", 2)]


def test_nproc_twice_and_different_is_refused_with_both():
    request = Request("x", nproc_per_node=2, torchrun_args={"nproc-per-node": "gpu"})
    with pytest.raises(TorchrunConfigError, match=r"nproc_per_node=2.*nproc-per-node='gpu'"):
        request.nproc_settings()


def test_nproc_never_reaches_torchrun_twice(script):
    spec = build(script, nproc=4, torchrun_args={"nproc_per_node": 4})
    words = agent_command(spec, MEETING, "/logs")
    assert [word for word in words if word.startswith("--nproc")] == ["--nproc-per-node=4"]


@pytest.mark.parametrize(
    ("request_", "port"),
    [
        ({}, None),
        ({"master_port": 29500}, 29500),
        ({"master_port": "29500"}, 29500),
        ({"torchrun_args": {"master_port": 29500}}, 29500),
        ({"master_port": 29500, "torchrun_args": ["--master-port=29500"]}, 29500),
        ({"step_port": 29400}, 29400),
        ({"step_port": 29400, "master_port": 29500}, 29500),
        ({"step_port": 29400, "torchrun_args": {"master-port": 29600}}, 29600),
    ],
)
def test_the_strongest_port_counts(request_, port, script):
    spec = build(script, **request_)
    assert spec.master_port == port
    assert "master-port" not in dict(spec.options)


def test_two_ports_are_refused_with_both(script):
    with pytest.raises(TorchrunConfigError, match=r"29500.*29501"):
        build(script, master_port=29500, torchrun_args={"master_port": 29501})


@pytest.mark.parametrize("wrong", [0, -1, 65536, 99999, "many", 1.5, True, "29500 29501", [29500]])
def test_a_wrong_port_is_refused_by_name(wrong):
    with pytest.raises(TorchrunConfigError, match=r"here is .* from 1 to 65535"):
        parse_port(wrong, "here")


@pytest.mark.parametrize(("value", "port"), [(None, None), ("", None), ("1", 1), (65535, 65535), (" 80 ", 80)])
def test_a_port_may_be_text(value, port):
    assert parse_port(value, "here") == port


@pytest.mark.parametrize(
    ("request_", "restarts"),
    [
        ({}, 0),
        ({"max_restarts": 2}, 2),
        ({"max_restarts": "2"}, 2),
        ({"torchrun_args": ["max-restarts", "3"]}, 3),
        ({"max_restarts": 3, "torchrun_args": {"max_restarts": 3}}, 3),
        ({"max_restarts": 0}, 0),
    ],
)
def test_restarts_are_the_gangs_and_not_torchruns(request_, restarts, script):
    spec = build(script, **request_)
    assert spec.max_restarts == restarts
    assert [w for w in agent_command(spec, MEETING, "/logs") if w.startswith("--max-restarts")] == ["--max-restarts=0"]


def test_two_numbers_of_restarts_are_refused_with_both(script):
    with pytest.raises(TorchrunConfigError, match=r"max_restarts=0.*max-restarts=3"):
        build(script, max_restarts=0, torchrun_args={"max_restarts": 3})


def test_local_ranks_filter_is_ours_to_do(script):
    spec = build(script, torchrun_args={"local_ranks_filter": "0,2"})
    assert spec.shown_local_ranks == {0, 2}
    assert spec.options == ()
    with pytest.raises(TorchrunConfigError, match="local-ranks-filter is 'first'"):
        build(script, torchrun_args={"local_ranks_filter": "first"})


def test_redirects_and_tee_are_ours_to_do(script):
    assert build(script, torchrun_args=["-r=3", "-t=3"]).options == ()


def test_an_option_of_a_newer_torch_is_passed_on(script):
    spec = build(script, torchrun_args={"brand_new": "a b", "monitor-interval": 1})
    words = agent_command(spec, MEETING, "/logs")
    assert "--brand-new=a b" in words[: words.index("--")]
    assert "--monitor-interval=1" in words[: words.index("--")]


# --- build_spec: entrypoint, environment, folder -------------------------------------------------


@pytest.mark.parametrize("missing", [None, ""])
def test_no_entrypoint_says_how_to_name_one(missing):
    with pytest.raises(EntrypointError, match=r"entrypoint='train.py'"):
        build(missing)


@pytest.mark.parametrize("wrong", [3, ["train.py"], b"train.py", print])
def test_an_entrypoint_of_another_kind_is_refused(wrong):
    with pytest.raises(EntrypointError):
        build(wrong)


@pytest.mark.parametrize(
    "name", ["train.py", "sub/folder/train.py", "a b/it's.py", "$HOME/größe 模型.py", "-rf/--x.py", 'q"uote\\.py']
)
def test_a_script_is_found_beside_the_flow(name, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    script = write(tmp_path / "flow" / name, "")
    assert build(name, flow_dir=str(tmp_path / "flow")).entrypoint == str(script)
    assert build(Path(name), flow_dir=str(tmp_path / "flow")).entrypoint == str(script)


def test_the_working_folder_comes_before_the_flows(tmp_path, monkeypatch):
    here, flow, other = (write(tmp_path / folder / "train.py", "") for folder in ("here", "flow", "other"))
    monkeypatch.chdir(here.parent)
    assert build("train.py", flow_dir=str(flow.parent)).entrypoint == str(here)
    assert build("train.py", flow_dir=str(flow.parent), cwd=str(other.parent)).entrypoint == str(other)


def test_a_missing_script_names_every_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flow_dir = tmp_path / "flow dir"
    with pytest.raises(EntrypointError) as caught:
        build("no such.py", flow_dir=str(flow_dir))
    assert str(tmp_path / "no such.py") in str(caught.value)
    assert str(flow_dir / "no such.py") in str(caught.value)


def test_a_folder_is_no_script(tmp_path):
    with pytest.raises(EntrypointError, match="does not exist"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    "request_", [{"module": True}, {"torchrun_args": ["-m"]}, {"module": True, "torchrun_args": ["-m"]}]
)
def test_a_module_is_not_looked_for_as_a_file(request_):
    spec = build("package.train", **request_)
    assert (spec.entrypoint, spec.module) == ("package.train", True)
    words = agent_command(spec, MEETING, "/logs")
    assert words.count("--module") == 1
    assert words[words.index("--") + 1] == "package.train"


def test_an_executable_is_not_looked_for_as_a_file():
    assert build("nvidia-smi", torchrun_args=["--no-python"]).entrypoint == "nvidia-smi"


def test_the_environment_of_a_launch_is_text(script):
    assert build(script, env={"N": 1, "HOSTILE": "$HOME 'x'\n"}).env == (("N", "1"), ("HOSTILE", "$HOME 'x'\n"))


@pytest.mark.parametrize("wrong", [{"A=B": 1}, {"": 1}, {"A": "x\0y"}, {"A\0": 1}, {3: 1}])
def test_a_variable_that_can_not_be_is_refused(wrong, script):
    with pytest.raises(TorchrunConfigError, match="can't be an environment variable"):
        build(script, env=wrong)


def test_an_environment_that_is_no_dict_is_refused(script):
    with pytest.raises(TorchrunConfigError, match="must be a dict"):
        build(script, env=["A=1"])


def test_a_working_folder_must_exist(script, tmp_path):
    assert build(script, cwd=str(tmp_path)).cwd == str(tmp_path)
    with pytest.raises(TorchrunConfigError, match="is not a folder"):
        build(script, cwd=str(tmp_path / "gone"))


def test_a_folder_for_logs_is_what_torchrun_would_take_it_for(script, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = {"torchrun_args": {"log_dir": "my logs"}}
    assert build(script, **asked).log_dir == str(tmp_path / "my logs")
    for cwd in ("here", str(tmp_path / "here")):
        assert build(script, cwd=cwd, **asked).log_dir == str(tmp_path / "here" / "my logs")
    assert build(script, cwd="here", torchrun_args={"log_dir": "/logs"}).log_dir == "/logs"
    assert build(script).log_dir is None


def test_ranks_are_counted_over_the_nodes():
    spec = spec_of(nproc=4, num_nodes=3, node_index=2)
    assert spec.world_size == 12
    assert [spec.global_rank(local) for local in range(4)] == [8, 9, 10, 11]


def test_the_fingerprint_ignores_what_may_differ_and_sees_what_may_not():
    spec = spec_of()
    assert spec.digest() == replace(spec, node_index=2, args=("x",), env=(("A", "1"),)).digest()
    assert spec.digest() == replace(spec, entrypoint="/another/place/train.py").digest()
    assert spec.digest() != replace(spec, entrypoint="/flow/other.py").digest()
    assert spec.digest() != replace(spec, module=True).digest()
    assert spec.digest() != replace(spec, options=(("role", "x"),)).digest()


# --- agent_command -------------------------------------------------------------------------------


def words_after_dashes(command):
    return command[command.index("--") + 1 :]


def as_torchrun_substitutes(words):
    """What torch's elastic agent does with the arguments of a worker (torch/distributed/elastic/utils/api.py)."""
    return [string.Template(word).safe_substitute(local_rank="7") for word in words]


def test_the_script_stands_behind_two_dashes_and_sees_what_was_given():
    command = agent_command(spec_of(args=tuple(HOSTILE)), MEETING, "/logs")
    assert as_torchrun_substitutes(words_after_dashes(command)) == ["/flow/train.py", *HOSTILE]


@given(st.lists(st.text(alphabet=st.sampled_from("$${}local_rank -x'\"\\é")), max_size=5))
def test_torchruns_template_gives_back_every_argument(args):
    command = agent_command(spec_of(args=tuple(args)), MEETING, "/logs")
    assert as_torchrun_substitutes(words_after_dashes(command)) == ["/flow/train.py", *args]


@pytest.mark.parametrize(
    ("facts", "program"),
    [
        ({}, ["/usr/bin/python3", "-u", "/flow/train.py"]),
        ({"module": True, "entrypoint": "pack.train"}, ["/usr/bin/python3", "-u", "-m", "pack.train"]),
        ({"options": (("no-python", None),), "entrypoint": "./run $me"}, ["./run $me"]),
    ],
)
def test_workers_are_told_how_often_the_gang_was_restarted(facts, program):
    spec = spec_of(args=tuple(HOSTILE), max_restarts=3, **facts)
    command = agent_command(spec, Rendezvous("10.0.0.1", 29512, "x", restarts=2), "/logs")
    told = ["env", "TORCHELASTIC_RESTART_COUNT=2", "TORCHELASTIC_MAX_RESTARTS=3"]
    assert as_torchrun_substitutes(words_after_dashes(command)) == [*told, *program, *HOSTILE]
    assert command.count("--no-python") == 1
    assert "--module" not in command


def test_without_restarts_the_command_is_plain_torchrun():
    assert "--no-python" not in agent_command(spec_of(), MEETING, "/logs")


def test_a_script_path_with_dollars_survives_torchruns_template():
    command = agent_command(spec_of(entrypoint="/my $HOME/${local_rank}.py"), MEETING, "/logs")
    assert as_torchrun_substitutes(words_after_dashes(command)) == ["/my $HOME/${local_rank}.py"]


def test_torchrun_gets_the_gangs_facts():
    command = agent_command(spec_of(), MEETING, "/my logs")
    assert command[:3] == ["/usr/bin/python3", "-m", "torch.distributed.run"]
    assert {
        "--nnodes=3",
        "--node-rank=1",
        "--nproc-per-node=2",
        "--rdzv-backend=static",
        "--rdzv-endpoint=10.0.0.7:29512",
        "--rdzv-id=launch0-0",
        "--redirects=3",
        "--log-dir=/my logs",
    } < set(command[: command.index("--")])


def test_an_ipv6_address_is_bracketed():
    command = agent_command(spec_of(), Rendezvous("fd00::7", 29512, "x"), "/logs")
    assert "--rdzv-endpoint=[fd00::7]:29512" in command


def test_a_rendezvous_id_of_the_user_replaces_ours():
    command = agent_command(spec_of(options=(("rdzv-id", "mine"),)), MEETING, "/logs")
    assert [word for word in command if "rdzv-id" in word] == ["--rdzv-id=mine"]


def test_the_shown_command_can_be_pasted():
    command = agent_command(spec_of(args=tuple(HOSTILE)), MEETING, "/log's $dir")
    assert shlex.split(shown(command)) == command


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10), min_size=1))
def test_any_shown_command_can_be_pasted(command):
    assert shlex.split(shown(command)) == command


# --- agent_environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "PET_NNODES",
    ],
)
def test_variables_of_an_outer_torchrun_are_dropped(name):
    inherited = {name: "5", "PATH": "/bin"}
    env = agent_environment(spec_of(), inherited, 2, None)
    assert name not in env
    assert env["PATH"] == "/bin"
    assert inherited == {name: "5", "PATH": "/bin"}


def test_variables_that_only_look_alike_are_kept():
    inherited = {"MY_RANK": "1", "PETS": "2", "RANKS": "3", "TORCH_HOME": "/t"}
    assert inherited.items() <= agent_environment(spec_of(), inherited, 2, None).items()


def test_defaults_fill_what_is_not_set():
    env = agent_environment(spec_of(), {}, 6, "eth0")
    assert env == {
        "PYTHONPATH": WORKER_HOOKS,
        "TORCHRUN_AGENT_PID": "",
        "OMP_NUM_THREADS": "6",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
@pytest.mark.parametrize("value", ["mine", ""])
def test_what_the_user_has_set_stays(name, value):
    assert agent_environment(spec_of(), {name: value}, 6, "eth0")[name] == value


def test_no_interface_sets_none():
    assert not [name for name in agent_environment(spec_of(), {}, 1, None) if "IFNAME" in name]


def test_the_launchs_own_environment_wins_over_everything():
    spec = spec_of(env=(("OMP_NUM_THREADS", "9"), ("PATH", "/mine"), ("MASTER_ADDR", "me")))
    env = agent_environment(spec, {"OMP_NUM_THREADS": "1", "PATH": "/bin"}, 6, None)
    assert (env["OMP_NUM_THREADS"], env["PATH"], env["MASTER_ADDR"]) == ("9", "/mine", "me")


def test_our_hooks_are_first_on_the_path_and_add_no_working_directory_to_it():
    env = agent_environment(spec_of(env=(("PYTHONPATH", "/mine:/too"),)), {"PYTHONPATH": "/task"}, 6, None)
    assert env["PYTHONPATH"] == f"{WORKER_HOOKS}:/mine:/too"
    assert agent_environment(spec_of(), {"PYTHONPATH": ""}, 6, None)["PYTHONPATH"] == WORKER_HOOKS


def test_an_outer_launchs_agent_is_not_taken_for_this_ones():
    assert agent_environment(spec_of(), {"TORCHRUN_AGENT_PID": "7"}, 6, None)["TORCHRUN_AGENT_PID"] == ""


def test_the_tasks_own_environment_is_untouched():
    before = dict(os.environ)
    agent_environment(spec_of(env=(("NEW", "1"),)), os.environ, 6, "eth0")
    assert dict(os.environ) == before
