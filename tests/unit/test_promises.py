"""The list of promises (tests/PROMISES.md): each promise has a test, and each test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROMISES = (REPOSITORY / "tests" / "PROMISES.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[^`]*)`,\s+`(\w+)`", PROMISES)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_test_that_it_names_exists():
    assert [f"{file}::{test}" for file, test in NAMED if test not in functions_of(file)] == []


def test_each_promise_has_a_test():
    without_titles_of_several = re.sub(r"^## .*\n\n(?=### )", "", PROMISES, flags=re.MULTILINE)
    promises = re.split(r"^##+ ", without_titles_of_several, flags=re.MULTILINE)[1:]
    assert [promise.partition("\n")[0] for promise in promises if "`tests/" not in promise] == []
