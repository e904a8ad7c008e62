"""The site that is made of the pages can be built without a warning, and its diagrams are of today."""

import runpy

from pages import NAMES, REPOSITORY, built_site, read


def test_the_site_is_built_strictly(tmp_path):
    assert (built_site(tmp_path) / "index.html").exists()


def test_the_diagrams_are_those_that_the_script_draws():
    drawn = runpy.run_path(str(REPOSITORY / "website" / "diagrams.py"))
    for name, draw in drawn["PICTURES"].items():
        kept = (drawn["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == draw().svg(), "run: python website/diagrams.py"
        assert any(f"({name}.svg)" in text or f"/{name}.svg)" in text for text in map(read, NAMES)), name
