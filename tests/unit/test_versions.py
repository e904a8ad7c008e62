"""What is declared, shown and run by the workflow are the rows of `make test-matrix`."""

from __future__ import annotations

import re
from pathlib import Path

from interpreters import MINORS
from version_matrix import NEWEST, ROWS

REPOSITORY = Path(__file__).parents[2]
SETUP = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
PAGE = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")


def parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_oldest_versions_that_are_declared_are_those_that_were_tried():
    python, _, metaflow = (min((row[at] for row in ROWS if row[at] != NEWEST), key=parts) for at in range(3))
    assert f'python_requires=">={python}"' in SETUP
    assert f'install_requires=["metaflow>={metaflow}"]' in SETUP
    passed = re.findall(r"^\| 3\.\d+ \| (\S+) \| \S+ \| \d+ passed \|", PAGE, re.MULTILINE)
    assert f'"torch>={".".join(min(passed, key=parts).split(".")[:2])}"' in SETUP


def test_the_pythons_that_are_declared_are_those_that_were_tried():
    named = re.findall(r'Python :: (3\.\d+)"', SETUP)
    assert named == [f"3.{minor}" for minor in MINORS]
    assert set(named) == {row.python for row in ROWS}


def test_no_version_of_pytorch_is_run_twice_and_the_newest_metaflow_stands_in_the_matrix():
    assert len({row.torch for row in ROWS}) == len(ROWS)
    assert {row.metaflow for row in ROWS} == {"2.13", NEWEST}


def test_the_page_says_what_was_run():
    shown = re.findall(r"^\| (3\.\d+) \| (\d[\d.]+) \| (\d[\d.]+) \|", PAGE, re.MULTILINE)
    assert [row[:2] for row in ROWS] == [row[:2] for row in shown]
    for row, (_, _, metaflow) in zip(ROWS, shown, strict=True):
        assert metaflow == row.metaflow or row.metaflow == NEWEST


def test_the_workflow_runs_each_row():
    workflow = (REPOSITORY / ".github" / "workflows" / "matrix.yml").read_text(encoding="utf-8")
    assert re.findall(r'"/([\d.]+)/"', workflow) == [row.torch for row in ROWS]
