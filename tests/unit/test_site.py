"""The site that is made of the pages: it can be built without a warning, holds every page, and needs nobody else."""

from __future__ import annotations

import re
import runpy

from pages import NAMES, REPOSITORY, built_site, read

# What a browser fetches by itself, other than by a click; and what an address of another host begins with.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?([^"'\s>]+)|url\(["']?([^"')]+)""")
LINKED = re.compile(r"""<link\b(?![^>]*rel=["']?(?:canonical|prev|next))[^>]*?\bhref=["']?([^"'\s>]+)""")
IMAGE = re.compile(r"""(?:!\[[^\]]*\]\(|\bsrc(?:set)?=")((?!https?:)[^)"\s]+\.(?:png|svg))""")
ELSEWHERE = re.compile(r"(?:https?:)?//")


def test_the_site_is_built_strictly_and_holds_every_page(tmp_path):
    site = built_site(tmp_path)
    made = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    expected = {re.sub(r"(README)?\.md$", lambda end: "index.html" if end[1] else ".html", name) for name in NAMES}
    elsewhere = {"index.html": "overview.html"}  # the README, since docs/index.md is the first page
    assert {elsewhere.get(name, name.removeprefix("docs/")) for name in expected} <= made
    example = (site / "examples" / "hello" / "index.html").read_text(encoding="utf-8")
    assert 'id="trainpy"' in example
    reference = (site / "api.html").read_text(encoding="utf-8")
    assert all(name in reference for name in ("hang_timeout_s", "TorchrunPreempted", "local_rank"))
    shown = re.sub(r"<[^>]+>|\s", "", reference)
    assert "module=False,process_group=None" in shown, "the signature of run is the one that it has at runtime"
    for page in site.rglob("*"):
        if page.suffix in (".html", ".css", ".svg"):
            text = page.read_text(encoding="utf-8")
            fetched = ["".join(found) for found in FETCHED.findall(text)] + LINKED.findall(text)
            assert [address for address in fetched if ELSEWHERE.match(address)] == [], page.name


def test_the_diagrams_are_those_that_the_script_draws():
    drawn = runpy.run_path(str(REPOSITORY / "website" / "diagrams.py"))
    for name, draw in drawn["PICTURES"].items():
        kept = (drawn["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == draw().svg(), "run: python website/diagrams.py"
        assert any(f"({name}.svg)" in text or f"/{name}.svg)" in text for text in map(read, NAMES)), name


def test_every_picture_of_a_page_exists_and_each_is_on_a_page():
    on_pages = {(REPOSITORY / name).parent / path for name in NAMES for path in IMAGE.findall(read(name))}
    assert [str(path) for path in on_pages if not path.is_file()] == []
    folder = REPOSITORY / "docs" / "images"
    assert {path.resolve() for path in on_pages} >= set(folder.iterdir()), "remove the pictures that no page shows"
