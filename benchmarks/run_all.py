"""Run all benchmarks one after the other, and tell which targets are met. `make bench` runs this."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from report import HEAD, table

HERE = Path(__file__).parent
# Each takes `--json FILE`. Those that need least time come first.
NAMES = "import_time many_nodes logs_of_all cost_of_supervision output whole_flow"
COMMANDS = [f"{name}.py" for name in f"{NAMES} step_time lost_nodes launches failures".split()]


def run(command: str, folder: Path) -> Path | None:
    """Run one of them, and return the file with its figures, or None if it has failed."""
    path = folder / f"{Path(command).stem}.json"
    path.unlink(missing_ok=True)
    print(f"\n=== {command}", flush=True)
    ended = subprocess.run([sys.executable, str(HERE / command), "--json", str(path)])
    return path if ended.returncode == 0 and path.exists() else None


def rows_of(path: Path) -> list[list[str]]:
    """Return the rows of those figures that have a target, each with its benchmark's name."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return [[told["benchmark"], *figure["row"]] for figure in told["figures"] if figure["target"] is not None]


def main() -> None:
    """Run all, then show all targets at once; only a benchmark that can't run is a failure."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, default=Path(".bench"), help="for the JSON of each; default: .bench")
    options.add_argument("--only", nargs="+", metavar="NAME", help="run these alone, as in many_nodes")
    options.add_argument("--json", type=Path, metavar="FILE", help="all figures in one file")
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    chosen = [command for command in COMMANDS if given.only is None or Path(command).stem in given.only]
    files = {command: run(command, given.folder) for command in chosen}
    print("\n=== all targets")
    rows = [row for path in files.values() if path is not None for row in rows_of(path)]
    for line in table(["benchmark", *HEAD], rows):
        print(line)
    if given.json is not None:
        told = [json.loads(path.read_text(encoding="utf-8")) for path in files.values() if path is not None]
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    failed = [command for command, path in files.items() if path is None]
    if failed:
        sys.exit(f"could not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
