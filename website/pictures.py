"""Makes the pictures of cards for the pages: ``python website/pictures.py`` runs flows and writes docs/images/card-*.png.

Each flow is a real local run. Metaflow writes its card to a file, and Chromium shows it. The flows run in a folder that
is the same on each machine, since a card shows paths.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the tests have what drives a browser

from chromium import MISSING, PROGRAMS, Chromium  # noqa: E402

FOLDER = ROOT / "docs" / "images"
DEMO = Path("/tmp/demo")  # noqa: S108 - a neutral path, and one that this script makes itself
LIMIT_BYTES = 200_000  # a page stays quick to load
_RUN_S = 300
_CHART = "[data-section-id=Timeline] .vega-embed"
_TABLE = "[data-section-id=Timeline] table"
_DRAWN = f"document.querySelector('{_CHART} canvas, {_CHART} svg')"
_FITS = "document.querySelector('.vega-embed').getBoundingClientRect().width <= {width}"
_MARGIN = 4
_WIDE, _NARROW = ((1280, False), (1280, True)), ((390, False), (390, True))


@dataclass(frozen=True)
class Picture:
    """One flow, and which part of its card is shown."""

    name: str
    source: str
    options: tuple[str, ...]
    fails: bool
    until: str  # the last element that is shown, as a CSS selector
    sizes: tuple[tuple[int, bool], ...] = _WIDE


PICTURES = (
    Picture("failed", "examples/first", ("--lr", "10"), True, _TABLE),
    Picture("hang", "website/pictured", ("--how", "hang"), True, _CHART),
    Picture("finished", "examples/first", (), False, _CHART, _WIDE + _NARROW),
    Picture("restarted", "website/pictured", ("--how", "killed"), False, _TABLE),
)


def _file_name(picture: Picture, width: int, dark: bool) -> str:
    return f"card-{picture.name}-{'dark' if dark else 'light'}-{width}.png"


def _card_of(picture: Picture) -> Path:
    """Run the flow of a picture, and return its card as a file."""
    flow = DEMO / Path(picture.source).name
    if not flow.exists():
        shutil.copytree(ROOT / picture.source, flow, ignore=shutil.ignore_patterns(".*", "__pycache__", "trained"))
    run_id, card = DEMO / "run-id", DEMO / f"{picture.name}.html"
    ended = _flow(flow, "run", "--run-id-file", str(run_id), *picture.options)
    if (ended.returncode != 0) != picture.fails:
        raise SystemExit(f"{picture.name}: the flow ended with {ended.returncode}\n{ended.stdout}")
    run = run_id.read_text().strip()
    (task,) = (path for path in DEMO.glob(f".metaflow/*/{run}/train/[0-9]*") if "_node_" not in path.name)
    got = _flow(flow, "card", "get", f"{run}/train/{task.name}", str(card))
    if got.returncode != 0:
        raise SystemExit(f"{picture.name}: no card\n{got.stdout}")
    return card


def _flow(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "METAFLOW_USER": "demo",
        "METAFLOW_DEFAULT_METADATA": "local",
        "METAFLOW_DEFAULT_DATASTORE": "local",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(DEMO),
    }
    command = [sys.executable, "-B", "flow.py", *words]
    return subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_RUN_S
    )


def _save(browser: Chromium, picture: Picture, card: Path) -> None:
    """Write the pictures of a card."""
    with browser.fresh_page():
        browser.show_as(*picture.sizes[0])
        browser.open(card.as_uri(), _DRAWN)
        for width, dark in picture.sizes:
            browser.show_as(width, dark)
            browser.wait_for(_FITS.format(width=width))
            browser.wait_for(_DRAWN)
            end = browser.value_of(
                f"document.querySelector('{picture.until}').getBoundingClientRect().bottom + scrollY"
            )
            path = FOLDER / _file_name(picture, width, dark)
            browser.screenshot(path, round(end) + _MARGIN)
            size = path.stat().st_size
            print(f"{path.relative_to(ROOT)}: {size} bytes")  # noqa: T201
            if size > LIMIT_BYTES:
                raise SystemExit(f"{path.name} has more than {LIMIT_BYTES} bytes: show less of the card")


def main() -> None:
    """Run all flows and write all pictures."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit(MISSING)
    if DEMO.exists():
        raise SystemExit(f"{DEMO} exists; the pictures show this path, so remove it first")
    DEMO.mkdir()
    try:
        folder = DEMO / "chromium"
        folder.mkdir()
        browser = Chromium(program, folder)
        try:
            for picture in PICTURES:
                _save(browser, picture, _card_of(picture))
        finally:
            browser.close()
    finally:
        shutil.rmtree(DEMO)


if __name__ == "__main__":
    main()
