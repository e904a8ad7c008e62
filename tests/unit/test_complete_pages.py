"""What the pages must not forget: every page is in the navigation, and every listed message of an error is one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import metaflow  # noqa: F401 - it imports our modules, so it must come before them
import pytest
from pages import NAMES, read

from metaflow_extensions.torchrun.plugins.torchrun import errors

PACKAGE = Path(errors.__file__).parent
MESSAGES = "docs/troubleshooting.md"


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
def texts() -> str:
    """Return all texts of the package, one a line."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant))
    return "\n".join(map(template, nodes))


@cache
def listed_messages() -> list[str]:
    """Return the parts of messages that the page lists: the code with which items of its lists begin."""
    items = re.findall(r"^- ((?:`[^`]+`, )*`[^`]+`):", read(MESSAGES).replace("\n  ", " "), re.MULTILINE)
    return [part for item in items for part in re.findall(r"`([^`]+)`", item)]


@pytest.mark.parametrize("part", listed_messages())
def test_a_listed_message_is_one(part):
    assert part in texts()


@pytest.mark.parametrize("page", [name for name in NAMES if name.startswith("docs/")])
def test_every_page_is_in_the_navigation_and_on_the_first_page(page):
    uri = page.removeprefix("docs/")
    assert re.search(rf"^ +- .*: {re.escape(uri)}$", read("mkdocs.yml"), re.MULTILINE), (
        f"add {uri} to nav in mkdocs.yml"
    )
    assert uri == "index.md" or f"]({uri})" in read("docs/index.md"), f"add {uri} to a table of docs/index.md"
