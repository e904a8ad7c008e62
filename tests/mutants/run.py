"""Breaks one behaviour after the other in a copy of this project, and tells whether the tests see it: ``make mutants``.

Each ``NN-name.patch`` beside this file is a mutant. Its head says in sentences which promise it breaks, what is broken,
what the user feels, and, in lines that begin with ``tests:``, which tests should fail. The diff follows. When the code
that it changes is written anew, make the patch again from the head.

The working tree is never changed: each mutant has a copy of its own, with a virtual environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
IMPORTABLE = "metaflow_extensions/torchrun/plugins/torchrun/worker/importable"  # where scripts find `metaflow_torchrun`
LIMIT_S = 900.0
SHARE = 0.9  # of the mutants must be caught
PASSED, FAILED = 0, 1  # pytest's exit codes; all others say that it could not run the tests


class Mutant(NamedTuple):
    """One patch."""

    name: str
    patch: Path
    tests: list[str]

    @classmethod
    def of(cls, patch: Path) -> Mutant:
        """Read a patch's head."""
        return cls(patch.stem, patch, re.findall(r"^tests: (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE))


def make_copy(copy: Path) -> None:
    """Copy all that git has, or would take, as it is in the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)


def make_environment(copy: Path) -> Path:
    """Make a virtual environment with the copy's package before all that this Python's environment has; return its Python."""
    venv.create(copy / ".venv", symlinks=True)
    ours = [copy, copy / IMPORTABLE, *site.getsitepackages()]
    (here,) = (copy / ".venv").glob("lib/python*/site-packages")
    (here / "ours.pth").write_text("".join(f"{each}\n" for each in ours), encoding="utf-8")
    return copy / ".venv" / "bin" / "python"


@contextmanager
def project() -> Iterator[tuple[Path, Path]]:
    """Yield a copy and its Python; at the end nothing is left of it, processes neither."""
    copy = Path(tempfile.mkdtemp(prefix="mutant-")).resolve()
    try:
        make_copy(copy)
        yield copy, make_environment(copy)
    finally:
        _end_all(os.fsencode(copy))
        shutil.rmtree(copy, ignore_errors=True)


def _end_all(folder: bytes) -> None:
    """End what tests have left running: a mutant may be that nothing ends it."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if any(folder in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")):
                os.kill(int(pid), signal.SIGKILL)


def run_tests(copy: Path, python: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit code and its output. Tests that take too long have failed."""
    (copy / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "VIRTUAL_ENV": str(copy / ".venv"), "TMPDIR": str(copy / "tmp")}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *options, *tests]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        tested = subprocess.Popen(command, cwd=copy, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            code = tested.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(tested.pid, signal.SIGKILL)
            tested.wait()
            code = FAILED
        output.seek(0)
        return code, output.read()


def judge(mutant: Mutant) -> str:
    """Return what became of a mutant: "caught by" a test, "survived", or why nobody knows."""
    with project() as (copy, python):
        applied = subprocess.run(["git", "apply", "-C1", mutant.patch], cwd=copy, capture_output=True, text=True)
        if applied.returncode != 0:
            return f"patch does not apply: {applied.stderr.strip()}"
        code, output = run_tests(copy, python, mutant.tests, "-x")
        if code not in (PASSED, FAILED):
            print(output)
    if code == FAILED:
        caught_by = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return f"caught by {', '.join(caught_by) or 'its time'}"
    return "survived" if code == PASSED else f"the tests could not run (exit code {code})"


def main() -> int:
    """Judge all mutants, or those that are named; return 1 if too few are caught, or one could not be judged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mutants", nargs="*", help="names, or their beginnings; default: all")
    given = parser.parse_args()
    every = [Mutant.of(patch) for patch in sorted(Path(__file__).parent.glob("*.patch"))]
    chosen = [each for each in every if not given.mutants or each.name.startswith(tuple(given.mutants))]
    if not chosen:
        parser.error(f"no mutant has such a name; there are {', '.join(each.name for each in every)}")
    tests = sorted({test for each in chosen for test in each.tests})
    print(f"{len(tests)} tests without a mutant", flush=True)
    with project() as (copy, python):
        for folder in sorted({test.split("/")[1] for test in tests}):  # two folders may have a file of one name
            code, output = run_tests(copy, python, [each for each in tests if each.split("/")[1] == folder])
            if code != PASSED:
                print(output)
                return 1
    results: list[str] = []
    for mutant in chosen:
        began = time.monotonic()
        results.append(judge(mutant) if mutant.tests else "survived")
        print(f"{mutant.name}: {results[-1]}, {time.monotonic() - began:.0f} s", flush=True)
    caught = sum(each.startswith("caught") for each in results)
    print(f"{caught} of {len(chosen)} mutants are caught")
    is_known = caught + results.count("survived") == len(chosen)
    return 0 if is_known and caught >= SHARE * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
