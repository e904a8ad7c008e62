"""What the pages must not forget: every page is in the navigation, and every message of an error is listed."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
import pytest
from pages import NAMES, read

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import _CATEGORIES, _SIGNAL_HINTS

PACKAGE = Path(errors.__file__).parent
MESSAGES = "docs/troubleshooting.md"
ERRORS = {*errors.CLASSES, "LintWarn", "CommandException", "GangHasEnded", "NoAnswer", "CommandFailed"}


def template(node: ast.expr) -> str:
    """Return a text as it stands in the source, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


@cache
def messages() -> dict[str, str]:
    """Return where each message of an error is made, by its text. What only hands on another has no words."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            texts = node.args[:1] if name in ERRORS else []
            if name == "FailureText":  # what begins with something filled in is in the pages' tables of causes
                given = [each.value for each in node.keywords if each.arg == "instead"]
                texts = [each for each in given if not template(each).startswith("…")]
            found |= {template(each): f"{path.relative_to(PACKAGE)}:{node.lineno}" for each in texts}
    return {text: where for text, where in found.items() if re.search(r"\w", text)}


@cache
def listed_messages() -> list[str]:
    """Return the parts of messages that the page lists: the code with which items of its lists begin."""
    items = re.findall(r"^- ((?:`[^`]+`, )*`[^`]+`):", read(MESSAGES).replace("\n  ", " "), re.MULTILINE)
    return [part for item in items for part in re.findall(r"`([^`]+)`", item)]


@pytest.mark.parametrize("text", messages())
def test_every_message_of_an_error_is_listed(text):
    assert any(part in text for part in listed_messages()), (
        f"{MESSAGES} does not list this message ({messages()[text]}). In the part of its class, add a line that begins "
        f"with some words of it, as in «- `words of it`: what to do». {text}"
    )


@pytest.mark.parametrize("part", listed_messages())
def test_a_listed_message_is_one(part):
    found = [where for text, where in messages().items() if part in text]
    assert len(found) == 1, f"{part!r} is in the messages of {found or 'nothing'}"


def test_the_page_of_messages_has_every_class_kind_and_signal():
    page = read(MESSAGES)
    headings = dict(re.findall(r"^## (\w+)\n\n\*(.+?)\.\*", page, re.MULTILINE))
    assert headings == {name: cls.headline for name, cls in errors.CLASSES.items()}
    assert [kind for kind in _CATEGORIES if f"| `{kind}` |" not in page] == []
    assert [name for name in _SIGNAL_HINTS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("page", [name for name in NAMES if name.startswith("docs/")])
def test_every_page_is_in_the_navigation_and_on_the_first_page(page):
    uri = page.removeprefix("docs/")
    assert re.search(rf"^ +- .*: {re.escape(uri)}$", read("mkdocs.yml"), re.MULTILINE), (
        f"add {uri} to nav in mkdocs.yml"
    )
    assert uri == "index.md" or f"]({uri})" in read("docs/index.md"), f"add {uri} to a table of docs/index.md"
