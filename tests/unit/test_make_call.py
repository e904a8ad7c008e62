"""One call of `run` becomes a launch, or an error that names what contradicts what."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.errors import EntrypointError, TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings
from metaflow_extensions.torchrun.plugins.torchrun.supervisor.call import Call, FunctionSpec
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import Position, resolve
from metaflow_extensions.torchrun.plugins.torchrun.task.make_call import make_call

PLACE = Position(num_nodes=2, node_index=1, main_addr="10.0.0.7")
SETTINGS = parse_settings({"master_port": 29400, "max_restarts": 5, "all_nodes_started_timeout": 90}, "train")
CALL = Call("/flow/train.py", (), False, nproc=2, num_nodes=3, node_index=1, python="/usr/bin/python3")


@pytest.fixture
def script(tmp_path):
    return str(write(tmp_path / "train.py", ""))


def build(entrypoint, entrypoint_args=None, place=PLACE, **arguments):
    given = {**arguments, "entrypoint": entrypoint, "entrypoint_args": entrypoint_args}
    return make_call(resolve(given, SETTINGS, place), place, nproc=2)


def refusal(*args, **arguments):
    with pytest.raises((TorchrunConfigError, EntrypointError)) as caught:
        build(*args, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            ({"torchrun_args": {option: value}}, [f"{option.replace('_', '-')}={value}", other])
            for option, value, other in (
                ("nnodes", 3, "num_parallel=2"),
                ("node_rank", 0, "node_index=1"),
                ("master_addr", "10.1.2.3", "contradicts the control node's address"),
                ("rdzv_backend", "etcd", "static"),
                ("rdzv_endpoint", "[fd00::8]:3339", "contradicts the control node's address"),
            )
        ),
        ({"torchrun_args": ["--standalone"]}, ["standalone contradicts num_parallel=2"]),
        *(
            (
                {"torchrun_args": {"nnodes": size, **more}},
                [f"nnodes={size} contradicts num_parallel=2 (all nodes", "max_restarts"],
            )
            for size, more in (("1:2", {}), ("1:2", {"rdzv_backend": "c10d"}), (":2", {}), ("2:", {}))
        ),
        ({"cwd": 3}, ["cwd", "path of a folder"]),
        *(({"env": wrong}, ["can't be"]) for wrong in ({"": 1}, {"N": None})),
        ({"env": {"A\0": 1}}, ["NUL"]),
        ({"env": {"A": "1", "NOTES": "x" * 131_066}}, ["env): NOTES has 131072 bytes", "one argument or variable"]),
        ({"env": ["A=1"]}, ["env", "must be a dict"]),
        ({"cwd": "/no such folder"}, ["'/no such folder'", "is not a folder"]),
        *(({"entrypoint": missing}, ["entrypoint='train.py'"]) for missing in (None, "")),
        ({"entrypoint": b"train.py"}, ["must be the path of a script, a function, or a command"]),
        *(({"entrypoint": wrong}, ["the entrypoint", "names no program"]) for wrong in ([], [""])),
        ({"entrypoint": ["sh", 3]}, ["a command is a list of texts and paths"]),
        ({"entrypoint": ["--max-restarts=3"]}, ["'--max-restarts=3'", "torchrun_args"]),
        ({"entrypoint": ["sh", "a\0b"]}, ["NUL"]),
        ({"entrypoint": ["no such program"]}, ["'no such program'", "PATH"]),
        ({"entrypoint": ["sh", "x"], "module": True}, ["module says how Python runs a script", "'sh'", "remove it"]),
        ({"entrypoint": ["sh", "x"], "torchrun_args": ["-m"]}, ["module says"]),
        ({"torchrun_args": ["--run-path"]}, ["run-path can't be used", "fork"]),
        ({"torchrun_args": {"virtual_local_rank": None}}, ["virtual-local-rank can't be used", "LOCAL_RANK"]),
        ({"torchrun_args": ["-h"]}, ["help can't be used"]),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(arguments, words, script):
    told = refusal(**{"entrypoint": script, **arguments})
    assert all(each in told for each in words)


@pytest.mark.parametrize("env", [{"A=B": "secret"}, {"N": "secret\0"}, {"N": "secret\ud800"}])
def test_an_error_does_not_show_what_may_be_a_secret(env, script):
    told = refusal(script, env=env)
    assert re.search(
        r"'A=B' can't be an environment variable|env\): N has a NUL character or half of a surrogate", told
    )
    assert "secret" not in told


# --- the gang ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agreeing", "num_nodes"),
    [
        ({"nnodes": 2, "node-rank": "1", "rdzv_backend": "static", "master_addr": "10.0.0.7", "nproc_per_node": 2}, 2),
        ({"nnodes": "2:2", "redirects": 3, "tee": 3}, 2),
        ({"nnodes": "2", "rdzv_backend": "c10d"}, 2),
        (["--standalone"], 1),
    ],
)
def test_what_the_gang_does_anyway_may_be_said(agreeing, num_nodes, script):
    place = replace(PLACE, num_nodes=num_nodes, node_index=num_nodes - 1)
    assert build(script, place=place, torchrun_args=agreeing).options == {}


# --- the entrypoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.py", "a b/it's.py", "$HOME/größe 模型.py", "-rf/--x.py", 'q"uote\\.py'])
def test_a_script_is_found_in_the_working_folder_and_then_beside_the_flow(name, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    flow, other = (write(tmp_path / folder / name, "") for folder in ("flow", "other"))
    place = replace(PLACE, flow_dir=str(tmp_path / "flow"))
    for given in (name, Path(name)):
        call = build(given, {"lr": 1}, place)
        assert (call.entrypoint, call.args, call.module) == (str(flow), ("--lr", "1"), False)
    assert build(name, place=place, cwd=str(tmp_path / "other")).entrypoint == str(other)
    here = write(tmp_path / "elsewhere" / name, "")
    assert build(name, place=place).entrypoint == str(here)


def test_a_missing_script_names_every_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    flow_dir = tmp_path / "flow dir"
    told = refusal("no such.py", place=replace(PLACE, flow_dir=str(flow_dir)))
    assert f"does not exist; looked for {tmp_path / 'no such.py'} and {flow_dir / 'no such.py'}." in told
    os.mkfifo(tmp_path / "a pipe")
    for name, what in (("a folder", "is a folder"), ("a pipe", "is no regular file")):
        assert f"'{tmp_path / name}' {what}" in refusal(name)


@pytest.mark.parametrize(
    ("module", "options"), [(True, None), (True, ["-m"]), (False, ["-m"]), (False, ["--no-python"])]
)
def test_a_module_or_executable_is_not_looked_for_as_a_file(module, options):
    call = build("package.train", module=module, torchrun_args=options)
    is_program = options == ["--no-python"]
    assert (call.entrypoint, call.module) == ("package.train", not is_program)
    assert call.options == ({"no-python": None} if is_program else {})


# --- a command -----------------------------------------------------------------------------------


def test_a_command_is_run_as_with_no_python_and_its_arguments_follow_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.py", "")
    call = build(["sh", Path("x.py"), "-O"], {"lr": 0.1})
    assert (call.entrypoint, call.args) == ("sh", ("x.py", "-O", "--lr", "0.1"))
    assert (call.options, call.command) == ({"no-python": None}, ("sh", "x.py", "-O"))
    assert build(("sh",), ["a"], torchrun_args={"no_python": True}).options == call.options
    assert not build(str(tmp_path / "x.py")).command


def program(path):
    return str(write(path, "#!/bin/sh\n").chmod(0o755) or path)


def test_a_bare_name_is_looked_for_in_the_path_that_the_workers_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program(tmp_path / "bin" / "mytool")
    assert build(["mytool"], env={"PATH": str(tmp_path / "bin")}).entrypoint == "mytool"
    program(tmp_path / "mytool")
    told = refusal(["mytool"], env={"PATH": "/nowhere"})
    assert "PATH of this node (/nowhere)" in told
    assert "write './mytool'" in told


def test_a_path_is_looked_for_as_a_script_is_and_must_be_executable(tmp_path, monkeypatch):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    place = replace(PLACE, flow_dir=str(tmp_path / "flow"))
    beside = program(tmp_path / "flow" / "run me.sh")
    assert build(["./run me.sh"], place=place).entrypoint == beside
    write(cwd / "run me.sh", "")
    assert "chmod" in refusal(["./run me.sh"], place=place)
    program(cwd / "run me.sh")
    assert build(["./run me.sh"], place=place).entrypoint == str(cwd / "run me.sh")


# --- the launch ----------------------------------------------------------------------------------


def test_the_fingerprint_ignores_what_may_differ_and_sees_what_may_not():
    same = [
        {"node_index": 2, "args": ("x",), "env": {"A": "1"}},
        {"entrypoint": "/another/place/train.py"},
        {"options": {"rdzv-id": "mine"}},
    ]
    others = [{"entrypoint": "/flow/other.py"}, {"module": True}, {"options": {"role": "x"}}]
    others.append({"function": FunctionSpec("train")})
    assert {replace(CALL, **changes).digest() for changes in same} == {CALL.digest()}
    words = [("sh", "x.py"), ("/bin/sh", "/b/x.py"), ("sh", "y.py"), ("sh",)]
    others += [{"entrypoint": each[0], "command": each} for each in words]
    assert len({replace(CALL, **changes).digest() for changes in [{}, *others]}) == len(others)
