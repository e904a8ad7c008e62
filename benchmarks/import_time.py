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
from functools import partial
from pathlib import Path

from packages import link_packages
from pairs import differences, in_folder, in_turns
from report import Report, parser

REPOSITORY = Path(__file__).parents[1]
ENV = {"METAFLOW_USER": "benchmark", "HOME": tempfile.gettempdir(), "PATH": os.defpath}
TARGET_MS = 15.0


def empty_extension(folder: Path) -> None:
    """Install an extension that has a file for each place where ours has one, and nothing in it."""
    places = ("plugins", "plugins/cards", "toplevel")
    files = [f"metaflow_extensions/empty/{place}/mfextinit_empty.py" for place in places]
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
    sources = folder.with_name("sources")
    shutil.copytree(REPOSITORY / "metaflow_extensions", sources / "metaflow_extensions")
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / file, sources)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(sources)], check=True)


def run(paths: list[str]) -> float:
    """Import Metaflow in a new process, which finds packages in these folders alone; return its CPU in ms."""
    words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {paths!r}; import metaflow"]
    _, status, used = os.wait4(os.posix_spawn(sys.executable, words, ENV), 0)
    if status != 0:
        sys.exit(f"could not import metaflow with {paths}")
    return 1000 * (used.ru_utime + used.ru_stime)


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure in turns."""
    for name, install in {"others": link_packages, "empty": empty_extension, "this": this_extension}.items():
        install(folder / name)
    cases = {"none": ("others",), "empty": ("empty", "others"), "this": ("this", "others")}
    variants = {case: partial(run, [str(folder / each) for each in found]) for case, found in cases.items()}
    in_turns(variants, 1)  # Python compiles what it imports first
    return in_turns(variants, rounds)


def main() -> None:
    """Tell what an extension adds, which is the difference within a round."""
    given = parser(__doc__, rounds=41).parse_args()
    told = Report("import of metaflow")
    cpu = in_folder(partial(measure, rounds=given.rounds))
    told.add("CPU, no extension", cpu["none"], "ms")
    told.add("CPU that an empty extension adds", differences(cpu["empty"], cpu["none"]), "ms")
    told.add("CPU that this extension adds", differences(cpu["this"], cpu["none"]), "ms", target=TARGET_MS)
    told.finish(given.json)


if __name__ == "__main__":
    main()
