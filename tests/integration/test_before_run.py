"""Commands before the workers, and in their place: whole gangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

FLOWS = Path(__file__).parent / "flows"


def test_a_command_is_run_as_torchrun_itself_would(make_gang, tmp_path):
    """With torchrun's own ``--no-python`` in a shell: the same arguments, options, files, folder and variables."""
    place, program = tmp_path / "place", "seen_by_shell.py"
    place.mkdir()
    shutil.copy(FLOWS / program, place)
    words, hostile = ["python", "-O", "-X", "utf8", program], ["", "--x", "a b", "é$", "*"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {"PATH": path, "SEEN": str(tmp_path / "theirs"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    network = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}", "--redirects=3"]
    in_shell = subprocess.run(
        [*torchrun, *options, f"--log-dir={tmp_path / 'logs'}", *words, *hostile],
        env={**kept, **env, **network, "TMPDIR": str(tmp_path)},
        cwd=place,
        capture_output=True,
        check=False,
    )
    gang = make_gang()
    ours = {**env, "SEEN": str(tmp_path / "ours")}
    gang.start(
        1, 2, entrypoint=words, entrypoint_args=hostile, cwd=str(place), agent_env=ours, settings={"warm": False}
    )
    assert gang.await_end(time.monotonic(), [0]).left == [], gang.told
    assert (in_shell.returncode, gang.error(0)) == (0, None), gang.told
    for rank in (0, 1):
        theirs, own = (json.loads((tmp_path / f"{who}-{rank}").read_text()) for who in ("theirs", "ours"))
        assert own["argv"] == [program, *hostile]
        assert own["optimize"] == 1
        for each in (theirs, own):
            for name in [
                "SEEN",
                "TMPDIR",
                "_",
                "SHLVL",
                "WORKER_DO",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                "OLDPWD",
                "PWD",
            ]:
                each["env"].pop(name, None)
            each["path"] = [entry for entry in each["path"] if not entry.endswith(("worker_hooks", "importable"))]
        assert own == theirs


MADE = """
import os, sys
print(os.environ["RANK"], __debug__, os.environ["NAME"], os.getcwd())
if os.environ["RANK"] == "3" and not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(1)
"""


def test_commands_run_once_on_each_node_before_any_worker_and_not_again_at_a_restart(run_flow, tmp_path):
    """The first launch makes its own entrypoint, fails once, and is a command."""
    (place := tmp_path / "a place").mkdir()
    made = {
        "entrypoint": [sys.executable, "-O", "made.py"],
        "cwd": str(place),
        "env": {"NAME": "löss", "TOKEN": "very-secret"},
        "before_run": [
            [sys.executable, "-c", f"open('made.py', 'w').write({MADE!r})"],
            "echo $NAME >> count; printf 'made\\r'; printf 'no end'; env | grep ^NAME >&2",
        ],
        "max_restarts": 1,
    }
    flow = run_flow(runs_=[made, {"entrypoint": "worker.py"}], attrs={"nproc_per_node": 2}, stand_in=True)
    assert (place / "count").read_text() == "löss\n" * 2
    result, second = flow.note("end")["tasks"][0]["results"]
    assert (len(result["restarts"]), second["launch"]) == (1, 1)
    for rank in range(4):
        assert f"[rank {rank}] {rank} False löss {place}" in flow.text
    for node in (0, 1):
        label = f"[node {node} before_run 2/2] "
        shown = [line.text.partition(label)[2] for line in flow.lines if label in line.text]
        assert shown[0].startswith("$ echo $NAME >> count;")
        assert shown[1:] == ["no endNAME=löss"] or shown[1:] == ["made", "no endNAME=löss"]
    assert "very-secret" not in flow.text
    kinds = [event["kind"] for event in result["events"]]
    assert kinds.index("before_run") < kinds.index("command") < kinds.index("ready") < kinds.index("go")
    assert "command" not in kinds[kinds.index("go") :]
    ended = [event for event in result["events"] if event["kind"] == "command"]
    assert sorted(node for event in ended for node in event["nodes"]) == [0, 0, 1, 1]
    shown = flow.ask("show")
    assert re.search(r"0 +nodes 0, 1: before_run 2/2 \(echo \$NAME .*\) exited with code 0, [\d.-]+ s", shown)
