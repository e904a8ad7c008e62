"""Runs real flows in folders of their own and leaves nothing behind: fixtures for tests/integration and tests/remote."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest
from gangs import marked
from limits import eventually, limit_s

FLOWS = Path(__file__).parent / "integration" / "flows"
STAND_IN = Path(__file__).parent / "stand_in"
RENAMING = Path(__file__).parent / "renamed"  # on PYTHONPATH, it renames what RENAMED says in all of Metaflow
# Of the names in ``compat/renamed.py`` those that Metaflow itself still works without when they are renamed in its text.
RENAMED_TOGETHER = """
MetaflowException MetaflowCard ParallelDecorator StepDecorator RELOAD_POLICY_ONCHANGE
_card_component_store _card_creator_args _card_creator _latest_user_data _card_proc _last_layout_change _render_seq
_last_render _run_cards_subprocess UserComponent with_default_component_id render_safely UI_URL
KUBERNETES_SANDBOX_INIT_SCRIPT UBF_CONTROL UNPACK_KEY TimeoutException TASK_LOG_SOURCE LOG_SOURCES
LINE_PARSER Parallel LintWarn _checks get_latest_run_id
CommandException print_metaflow_exception print_unknown_exception default_storage_impl DEFAULT_DATASTORE
SPIN_ALLOWED_DECORATORS from_conf persist ubf_iter command_options decospecs statically_defined split_parents
parallel_foreach out_funcs func_lineno secs
"""
MARK = "GANG_TEST_MARK"
# CPython before 3.14 ends gloo's threads at its own end, and C++ aborts (torch 2.13, pytorch/pytorch#179291): one run in
# hundreds, under torchrun alone, too, after all work is done. No script can do anything about it, so it is run once more.
ABORTED_AT_EXIT = "terminate called without an active exception"
TESTED_BY = "TORCHRUN_TESTED_BY"  # see conftest.py


def heed_terminal() -> None:
    """Let a program hear SIGINT and SIGHUP, which what a shell or ``nohup`` starts in the background ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Line:
    """One line of a flow's output and when it arrived."""

    text: str
    stream: str
    at: float


class Running:
    """A flow that runs, or has run, and what it has written."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], one_stream: bool = False) -> None:
        self.env = env
        self.lines: list[Line] = []
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if one_stream else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=heed_terminal,
        )
        streams = ("stdout",) if one_stream else ("stdout", "stderr")
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: str) -> None:
        with getattr(self.process, stream) as lines:
            for line in lines:
                self.lines.append(Line(line.rstrip("\n"), stream, time.time()))

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def await_text(self, pattern: str, after: int = 0, timeout_s: float = 120) -> re.Match[str]:
        """Wait until something that was written after so many characters matches."""

        def found() -> re.Match[str] | None:
            is_over = self.process.poll() is not None
            match = re.compile(pattern).search(self.text, after)
            assert match or not is_over, f"ended without {pattern}:\n{self.text}"
            return match

        match = eventually(found, lambda: f"{pattern}\n{self.text}", limit_s(timeout_s))
        assert match
        return match

    def wait(self, timeout_s: float = 120) -> int:
        """Wait for its end, so long on a quiet machine."""
        code = self.process.wait(limit_s(timeout_s))
        for reader in self._readers:
            reader.join(limit_s(10))
        return code


class FlowRun(Running):
    """A flow on this machine."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], home: Path) -> None:
        self.out, self.home, self._command, self._folder = Path(env["GANG_OUT"]), home, command, folder
        super().__init__(command, folder, env)

    @property
    def run_id(self) -> str:
        (found,) = set(re.findall(r"\(run-id (\d+)\)", self.text))
        return found

    def ask(self, *words: str, expect: int | None = 0, **env: str) -> str:
        """Return what ``torchrun WORDS`` says of this flow, and what it complains of if that is expected; None: it may."""
        command = [*self._command[:3], "torchrun", *words]
        env = {**self.env, **env}
        asked = subprocess.run(command, cwd=self._folder, env=env, capture_output=True, text=True, timeout=limit_s(120))
        assert expect in (None, asked.returncode), asked.stdout + asked.stderr
        return asked.stdout + (asked.stderr if expect != 0 else "")

    def note(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def notes(self, pattern: str) -> list[Any]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob(pattern)) if path.suffix != ".part"]

    def await_notes(self, pattern: str, count: int, timeout_s: float = 60) -> list[Any]:
        def are_there() -> bool:
            is_over = self.process.poll() is not None
            are = len(self.notes(pattern)) >= count
            assert are or not is_over, self.text
            return are

        eventually(are_there, lambda: f"{count} {pattern}\n{self.text}", limit_s(timeout_s))
        return self.notes(pattern)

    def processes(self) -> list[psutil.Process]:
        """Every living process that this run has started, however it detached itself."""
        found = []
        for pid in marked(MARK, self.env[MARK]):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def await_gone(self) -> None:
        """Wait until no process is left."""
        eventually(lambda: not self.processes(), lambda: f"the end of {[*map(_told, self.processes())]}", limit_s(20))

    def errors(self) -> list[dict[str, Any]]:
        return self.notes("error-*")


def _told(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} since {process.create_time():.1f}: {' '.join(process.cmdline())[:300]}"
    return f"{process.pid}, which has ended"


def supervisor(flow: FlowRun, task: int) -> psutil.Process:
    """Return the supervisor beside a task. Its parent has the same command line."""
    beside = []
    for process in flow.processes():
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "torchrun.supervisor.between" in " ".join(words) and str(task) in words:
                beside.append(process)
    (found,) = [each for each in beside if each.parent() in beside]
    return found


# argv: flow/run of `flows/outputs.py`, and a folder for the files.
READ_OUTPUTS = """
import json, sys
from pathlib import Path
from metaflow import Run, namespace
namespace(None)
data = Run(sys.argv[1]).data
outputs = data.results[0].outputs
folder = outputs.download(sys.argv[2])
print("TOLD " + json.dumps({
    "alone": [data.alone.outputs.nodes, [file.name for file in data.alone.outputs]],
    "shown": repr(outputs),
    "part": outputs.open("good \\u6a21\\u578b/shards/1.bin").read(3).decode(),
    "sizes": {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()},
}))
"""


def ask(script: str, *arguments: str, folder: Path, env: dict[str, str]) -> Any:
    """Run a script that prints TOLD and JSON, in a process of its own; return what it tells."""
    told = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    found = [line.removeprefix("TOLD ") for line in told.stdout.splitlines() if line.startswith("TOLD ")]
    assert found, told.stdout + told.stderr
    return json.loads(found[0])


def content_of(page: str) -> str:
    """Return what Metaflow's page of a card shows, as JSON: it stands there in base64."""
    found = re.search(r'__MF_DATA__\["[^"]*"\] = "([A-Za-z0-9+/=]*)"', page)
    assert found is not None, page[:2000]
    return base64.b64decode(found[1]).decode()


def write_flow(
    folder: Path, train: str, step: str = "@torchrun", size: int = 2, head: str = "", more: str = ""
) -> None:
    """Write ``flow.py``, whose step `train`, decorated with `step`, runs some lines; `more` are further steps."""
    for name in ("around.py", "notes.py", "worker.py"):
        shutil.copy(FLOWS / name, folder)
    lines = indent(train.strip(), " " * 8)
    text = f"""{head}
from around import Around
from metaflow import card, current, step, torchrun


class Gang(Around):
    @step
    def start(self):
        self.next(self.train, num_parallel={size})

    {step}
    @step
    def train(self):
{lines}
        self.next(self.join)

{indent(more, " " * 4)}

if __name__ == "__main__":
    Gang()
"""
    (folder / "flow.py").write_text(text, encoding="utf-8")


StartFlow = Callable[..., FlowRun]


@pytest.fixture
def start_flow(tmp_path: Path) -> Iterator[StartFlow]:
    """Return a function that starts a flow; at the end of the test nothing of it may be left."""
    yield from starting_flows(tmp_path)


@pytest.fixture(scope="module")
def start_shared_flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartFlow]:
    """Return what `start_flow` returns, for flows that several tests of a module look at."""
    yield from starting_flows(tmp_path_factory.mktemp("shared"))


def starting_flows(tmp_path: Path) -> Iterator[StartFlow]:
    """Yield a function that starts a flow with its files in `tmp_path`; after that nothing of it may be left.

    `before` are options that stand before the command; `keep_settings` hands on the ``METAFLOW_*`` of
    this process, save for where the user's own files are. `stand_in` has a stand-in for torchrun start the workers,
    which saves 1.6 s of a core on each node in each launch: it is for tests of what torchrun has no part in.
    """
    runs: list[FlowRun] = []

    def start(
        *arguments: str,
        flow: str | Path = "gang.py",
        folder: Path | None = None,
        env: dict[str, str] | None = None,
        attrs: dict[str, Any] | None = None,
        runs_: list[dict[str, Any]] | None = None,
        hook: str = "",
        do: str = "",
        command: str = "run",
        python: str = sys.executable,
        before: tuple[str, ...] = (),
        keep_settings: bool = False,
        stand_in: bool = False,
    ) -> FlowRun:
        home = tmp_path / "home"
        place = tmp_path / "flow folder" if folder is None else folder
        if folder is None and not place.exists():
            shutil.copytree(FLOWS, place)
            shutil.copy(Path(__file__).parent / "spares.py", place)
        out = tmp_path / f"out-{len(runs)}"
        out.mkdir()
        full = {
            **{name: value for name, value in os.environ.items() if keep_settings or not name.startswith("METAFLOW_")},
            TESTED_BY: "",  # a flow that tests share goes on between them; what it leaves is found at its end
            "METAFLOW_USER": "tester",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home),
            "METAFLOW_HOME": str(tmp_path / "config"),
            "GANG_OUT": str(out),
            "GANG_HOOK": hook,
            "WORKER_DO": do,
            MARK: uuid.uuid4().hex,
            **({"PYTHONPATH": str(STAND_IN)} if stand_in else {}),
            **({"GANG_ATTRS": json.dumps(attrs)} if attrs is not None else {}),
            **({"GANG_RUNS": json.dumps(runs_)} if runs_ is not None else {}),
            **(env or {}),
        }
        run = FlowRun([python, str(flow), "--no-pylint", *before, command, *arguments], place, full, home)
        runs.append(run)
        return run

    yield start
    for run in runs:
        left = {process: _told(process) for process in run.processes()}
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        run.wait(10)
        assert not left, f"left running: {list(left.values())}\n{run.text[-3000:]}"


@pytest.fixture
def run_flow(start_flow: StartFlow) -> Callable[..., FlowRun]:
    """Return a function that runs a flow to its end."""

    def run(*arguments: Any, expect: int | None = 0, timeout_s: float = 120, **options: Any) -> FlowRun:
        flow = start_flow(*arguments, **options)
        code = flow.wait(timeout_s)
        assert expect is None or code == expect, flow.text
        return flow

    return run
