"""An environment for benchmarks, with all packages of this one but for Metaflow's extensions."""

from __future__ import annotations

from pathlib import Path


def link_packages(folder: Path) -> None:
    """Fill a new folder with links to the packages of this environment, but for Metaflow's extensions."""
    import metaflow

    folder.mkdir(parents=True)
    for entry in Path(metaflow.__file__).parents[1].iterdir():
        if not entry.name.startswith(("metaflow_", "__editable__", "__pycache__")):
            (folder / entry.name).symlink_to(entry)
