"""Runs real flows in folders of their own and leaves nothing behind: fixtures for tests/integration and tests/remote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

FLOWS = Path(__file__).parent / "integration" / "flows"
MARK = "GANG_TEST_MARK"


def heed_ctrl_c() -> None:
    """Let a flow hear SIGINT, which a shell's background jobs, and all they start, ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Line:
    """One line of a flow's output and when it arrived."""

    text: str
    stream: str
    at: float


@dataclass
class FlowRun:
    """A flow that runs, or has run."""

    process: subprocess.Popen[str]
    out: Path
    home: Path
    mark: str
    lines: list[Line] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def wait(self, timeout_s: float = 120) -> int:
        code = self.process.wait(timeout_s)
        for thread in self.threads:
            thread.join(10)
        return code

    def note(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def notes(self, pattern: str) -> list[Any]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob(pattern)) if path.suffix != ".part"]

    def await_notes(self, pattern: str, count: int, timeout_s: float = 60) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while len(found := self.notes(pattern)) < count:
            assert time.monotonic() < deadline, f"only {len(found)} of {count} {pattern}:\n{self.text}"
            assert self.process.poll() is None or len(self.notes(pattern)) >= count, self.text
            time.sleep(0.02)
        return found

    def processes(self) -> list[psutil.Process]:
        """Every living process that this run has started, however it detached itself."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def await_gone(self, timeout_s: float) -> float:
        """Wait until no process is left; return the seconds it took."""
        begin = time.monotonic()
        while left := self.processes():
            if time.monotonic() - begin > timeout_s:
                raise AssertionError(f"still there after {timeout_s} s: {[p.cmdline() for p in left]}\n{self.text}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def errors(self) -> list[dict[str, Any]]:
        return self.notes("error-*")


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
    this process, save for where the user's own files are.
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
    ) -> FlowRun:
        home = tmp_path / "home"
        place = tmp_path / "flow folder" if folder is None else folder
        if folder is None and not place.exists():
            shutil.copytree(FLOWS, place)
        out = tmp_path / f"out-{len(runs)}"
        out.mkdir()
        mark = uuid.uuid4().hex
        full = {
            **{name: value for name, value in os.environ.items() if keep_settings or not name.startswith("METAFLOW_")},
            "METAFLOW_USER": "tester",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home),
            "METAFLOW_HOME": str(tmp_path / "config"),
            "GANG_OUT": str(out),
            "GANG_HOOK": hook,
            "WORKER_DO": do,
            MARK: mark,
            **({"GANG_ATTRS": json.dumps(attrs)} if attrs is not None else {}),
            **({"GANG_RUNS": json.dumps(runs_)} if runs_ is not None else {}),
            **(env or {}),
        }
        process = subprocess.Popen(
            [python, str(flow), "--no-pylint", *before, command, *arguments],
            cwd=place,
            env=full,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        run = FlowRun(process, out, home, mark, env=full)
        for stream in ("stdout", "stderr"):
            thread = threading.Thread(target=collect_lines, args=(run, stream), daemon=True)
            thread.start()
            run.threads.append(thread)
        runs.append(run)
        return run

    yield start
    for run in runs:
        left = run.processes()
        for process in left:
            process.send_signal(signal.SIGKILL)
        run.process.wait(10)
        for thread in run.threads:
            thread.join(10)
        for pipe in (run.process.stdout, run.process.stderr):
            if pipe is not None:
                pipe.close()
        assert not left, f"left running: {left}"


def collect_lines(run: Any, stream: str) -> None:
    """Keep every line that a run's process writes to a stream."""
    for line in getattr(run.process, stream):
        run.lines.append(Line(line.rstrip("\n"), stream, time.time()))


@pytest.fixture
def run_flow(start_flow: StartFlow) -> Callable[..., FlowRun]:
    """Return a function that runs a flow to its end."""

    def run(*arguments: Any, expect: int | None = 0, timeout_s: float = 120, **options: Any) -> FlowRun:
        flow = start_flow(*arguments, **options)
        code = flow.wait(timeout_s)
        assert expect is None or code == expect, flow.text
        return flow

    return run
