"""The gang's page, as data: what stands on it, and that no text of a worker's can become markup."""

import html
import json
import re

import pytest
from gang_views import MARKUP, Story, hostile, place
from unit_helpers import HOSTILE

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.show import gang_part
from metaflow_extensions.torchrun.plugins.torchrun.show.gang_part import GangPart
from metaflow_extensions.torchrun.plugins.torchrun.show.page import page_of
from metaflow_extensions.torchrun.plugins.torchrun.show.parts import layout, one_line


def a_gang():
    return Story().running().view


def html_of(component):
    """Return all HTML of a component and of those in it."""
    if component["type"] == "markdown":
        yield component["source"]
    for each in component.get("contents", ()):
        yield from html_of(each)


@pytest.mark.parametrize("text", [*HOSTILE, MARKUP, "\ud800"])
def test_a_text_stays_a_text(text):
    shown = one_line(text)
    assert not {*"<>\"'\n\r"} & {*shown}
    assert html.unescape(shown) == text.translate({0x1B: "\ufffd", 0: "\ufffd"})


def test_no_name_or_traceback_becomes_markup():
    page = layout(page_of(hostile().view, place(), is_short=True))
    allowed = {"div", "span", "p", "b", "dl", "dt", "dd", "pre", "ul", "li", "small", "details", "summary"}
    for source in html_of(page):
        assert source.startswith("<div ")
        assert not {"\n", "\r"} & {*source}, "Markdown would see where a line ends"
        for tag, attributes in re.findall(r"</?(\w*)([^<>]*)", source):
            assert tag in allowed
            assert {*re.findall(r"([\w-]+)=\"", attributes)} <= {"class", "title"}
    tables = [each for section in page["contents"] for each in section["contents"] if each["type"] == "table"]
    cells = [cell for table in tables for row in table["data"] for cell in row]
    assert len(cells) > 10
    assert all(isinstance(cell, str) for cell in cells), "Metaflow shows a string in a table as text"


def test_the_sections_that_replace_others_have_their_ids():
    first = layout(page_of(Story().view, place()))
    later = layout(page_of(hostile().view, place()))
    assert [each["id"] for each in first["contents"]] == [each["id"] for each in later["contents"]]


def test_a_users_card_gets_the_parts_that_it_names_in_our_order_and_their_style(monkeypatch):
    monkeypatch.setattr(gang_part, "place_of_card", lambda pathspec: place())
    shown = GangPart(("timeline", "outcome"), a_gang)
    shown.component_id = "mine"
    found = shown.render()
    json.dumps(found)
    assert (found["type"], found["id"]) == ("section", "mine")
    style, outcome, timeline = found["contents"]
    assert style["source"].startswith("<style>")
    assert ":root" not in style["source"], "it would change the rest of the user's card"
    assert ".tr-running" in style["source"]
    assert (outcome["id"], timeline["title"]) == ("gang-outcome", "Timeline")
    everything = GangPart((), a_gang).render()["contents"][1:]
    assert everything == layout(page_of(a_gang(), place()))["contents"]


def test_a_part_that_shows_nothing_says_why():
    part = GangPart(("outcome",), lambda: None)
    assert "Render failed of component named `GangPart`" in part.render()["data"]
    (nothing,) = html_of(GangPart((), lambda: "No launch has begun yet.").render())
    assert "No launch has begun yet." in nothing


def test_an_unknown_part_is_refused_where_it_is_asked_for():
    with pytest.raises(TorchrunConfigError, match=r"knows no part 'rank'\. The parts are 'outcome', 'hangs', "):
        GangPart(("rank",), a_gang)
