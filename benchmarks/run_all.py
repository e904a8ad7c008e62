"""Run all benchmarks one after the other, and tell which targets are met. `make bench` runs this."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from report import HEAD, Figure, table

HERE = Path(__file__).parent
# Each takes `--json FILE`. Those that need least time come first.
COMMANDS = (
    "import_time.py",
    "many_nodes.py",
    "cost_for_workers.py",
    "datastore_requests.py",
    "logs_of_all.py",
    "cost_of_supervision.py",
    "output.py",
    "whole_flow.py",
    "step_time.py",
    "launches.py",
    "failures.py",
)


def run(command: str, folder: Path) -> Path | None:
    """Run one of them, and return the file with its figures, or None if it has failed."""
    program, *words = shlex.split(command)
    path = folder / f"{Path(program).stem}.json"
    path.unlink(missing_ok=True)
    print(f"\n=== {command}", flush=True)
    ended = subprocess.run([sys.executable, str(HERE / program), *words, "--json", str(path)])
    return path if ended.returncode == 0 and path.exists() else None


def rows_of(path: Path) -> list[list[str]]:
    """Return the rows of those figures that have a target, each with its benchmark's name."""
    told = json.loads(path.read_text(encoding="utf-8"))
    names = Figure.__dataclass_fields__
    figures = [Figure(**{name: value for name, value in entry.items() if name in names}) for entry in told["figures"]]
    return [[told["benchmark"], *figure.as_row()] for figure in figures if figure.target is not None]


def main() -> None:
    """Run all, then show all targets at once; only a benchmark that can't run is a failure."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="for the JSON of each; default: .bench")
    options.add_argument("--only", nargs="+", metavar="NAME", help="run these alone, as in many_nodes")
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    chosen = [command for command in COMMANDS if given.only is None or Path(command.split()[0]).stem in given.only]
    files = {command: run(command, given.folder) for command in chosen}
    print("\n=== all targets")
    rows = [row for path in files.values() if path is not None for row in rows_of(path)]
    for line in table(["benchmark", *HEAD], rows):
        print(line)
    failed = [command for command, path in files.items() if path is None]
    if failed:
        sys.exit(f"could not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
