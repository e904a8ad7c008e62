"""What this extension adds to ``import metaflow``, which every flow pays: beside none, and beside an empty extension.

Metaflow itself looks through all installed packages as soon as there is one extension, and through all files of each
extension. The empty one tells what of the cost that is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from packages import link_packages
from pairs import differences, in_turns
from report import Report, parser

REPOSITORY = Path(__file__).parents[1]
ENV = {"METAFLOW_USER": "benchmark", "HOME": tempfile.gettempdir(), "PATH": os.defpath}
TARGET_MS = 15.0


class Took(NamedTuple):
    """What a process took, in milliseconds."""

    wall: float
    cpu: float


def empty_extension(folder: Path) -> None:
    """Install an extension that has a file for each place where ours has one, and nothing in it."""
    files = [
        f"metaflow_extensions/empty/{place}/mfextinit_empty.py" for place in ("plugins", "plugins/cards", "toplevel")
    ]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("CARDS = []\n" if "cards" in name else "", encoding="utf-8")
    about = folder / "metaflow_empty-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: metaflow-empty\nVersion: 1\n", encoding="utf-8")
    (about / "top_level.txt").write_text("metaflow_extensions\n", encoding="utf-8")
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in files), encoding="utf-8")


def this_extension(folder: Path) -> None:
    """Install this project as a user does, not as a developer: an editable install costs more."""
    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        for file in ("setup.py", "pyproject.toml", "README.md"):
            shutil.copy(REPOSITORY / file, sources)
        shutil.copytree(REPOSITORY / "metaflow_extensions", sources / "metaflow_extensions")
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(sources)], check=True)


def run(paths: list[str]) -> Took:
    """Import Metaflow in a new process, which finds packages in these folders alone."""
    words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {paths!r}; import metaflow"]
    begun = time.monotonic()
    pid = os.posix_spawn(sys.executable, words, ENV)
    _, status, used = os.wait4(pid, 0)
    seconds = time.monotonic() - begun
    if status != 0:
        sys.exit(f"could not import metaflow with {paths}")
    return Took(1000 * seconds, 1000 * (used.ru_utime + used.ru_stime))


def main() -> None:
    """Measure in turns; what an extension adds is the difference within a round."""
    given = parser(__doc__, rounds=41).parse_args()
    told = Report("import of metaflow")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link_packages(folder / "others")
        empty_extension(folder / "empty")
        this_extension(folder / "this")
        extensions = {"no extension": (), "an empty extension": ("empty",), "this extension": ("this",)}
        ways = {
            case: partial(run, [str(folder / each) for each in (*found, "others")])
            for case, found in extensions.items()
        }
        for way in ways.values():
            way()  # Python compiles what it imports first
        taken = in_turns(ways, given.rounds)
    for clock in Took._fields:
        found = {case: [getattr(each, clock) for each in tooks] for case, tooks in taken.items()}
        without = found["no extension"]
        name = {"wall": "time", "cpu": "CPU"}[clock]
        told.add(f"{name}, no extension", without, "ms")
        told.add(f"{name} that an empty extension adds", differences(found["an empty extension"], without), "ms")
        adds = differences(found["this extension"], without)
        told.add(f"{name} that this extension adds", adds, "ms", target=TARGET_MS)
    told.finish(given.json)


if __name__ == "__main__":
    main()
