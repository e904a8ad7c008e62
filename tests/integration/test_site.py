"""The site in a browser: nothing sticks out or is cut, nothing comes from elsewhere, and it can be read from the disk."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from pathlib import Path

import pytest
from pages import built_site

pytestmark = pytest.mark.xdist_group("site")
READY = "document.readyState == 'complete'"
# Pages with the widest tables, code and pictures.
WIDE = ["index.html", "how.html", "migration.html", "troubleshooting.html", "api.html", "networks.html", "card.html"]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SIGNS = "[...document.querySelectorAll('.headerlink')].filter(sign => sign.offsetWidth).length"
FETCHED = "performance.getEntriesByType('resource').map(each => each.name)"
# Texts that stick out of the picture.
CUT = """
[...document.querySelectorAll('text')].filter(text => {
    const box = text.getBBox();
    return box.x < 4 || box.x + box.width > document.documentElement.viewBox.baseVal.width - 4;
}).map(text => text.textContent)
"""
# Code whose lines are longer than its box.
CUT_CODE = """
[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => [code.scrollWidth, code.clientWidth, code.textContent.slice(0, 80)])
"""
# Where a newcomer begins.
FRONT = ["index.html", "start.html", "overview.html", "from-one-gpu.html", "install.html", "how.html", "backends.html"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return built_site(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(site)))
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def keep_picture(chromium, name):
    """Keep a picture of what is shown, where somebody wants to look at it."""
    folder = os.environ.get("CARD_IMAGES")
    if folder:
        chromium.screenshot(Path(folder) / f"site-{name}.png")


def test_pages_fit_their_windows_and_fetch_nothing_from_elsewhere(chromium, address):
    for page in WIDE:
        chromium.show_as(390)
        chromium.open(f"{address}/{page}", READY)
        for width, dark in [(390, False), (390, True), (1280, False), (1280, True)]:
            chromium.show_as(width, dark)
            chromium.wait_for(f"{OVERFLOW} <= 0")  # of a wide window the menu of a narrow one goes its way first
            assert (chromium.value_of(SIGNS) > 0) == (width > 480), "a heading's sign, which a phone has no room for"
            keep_picture(chromium, f"{page}-{width}-{'dark' if dark else 'light'}")
        fetched = chromium.value_of(FETCHED)
        assert len(fetched) > 3
        assert [name for name in fetched if not name.startswith(address)] == []


def test_no_text_of_a_diagram_is_cut(chromium, address):
    for name in ("gang", "node", "launch", "failure", "function"):
        chromium.open(f"{address}/images/{name}.svg", READY)
        assert chromium.value_of("document.querySelectorAll('text').length") > 5
        assert chromium.value_of(CUT) == [], name


def test_the_first_pages_can_be_read_from_the_disk_and_no_code_is_cut(chromium, site):
    for page in FRONT:
        chromium.show_as(1280)
        chromium.open((site / page).as_uri(), READY)
        assert chromium.value_of("document.querySelectorAll('[data-md-component=search]').length") == 0, page
        for width, dark in [(1280, False), (1280, True), (390, False), (390, True)]:
            chromium.show_as(width, dark)
            chromium.wait_for(f"{OVERFLOW} <= 0")
            assert width == 390 or chromium.value_of(CUT_CODE) == [], page
            keep_picture(chromium, f"{page}-{width}-{'dark' if dark else 'light'}")
