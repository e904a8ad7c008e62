"""What runs these tests elsewhere: the workflows of GitHub, and `.ci/run`."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from pages import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TEXTS = [*WORKFLOWS, REPOSITORY / ".ci" / "run"]
# A tag can be moved to other code; a commit can't. The comment tells people which one it is.
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def steps_of(workflow):
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_foreign_actions_are_named_by_their_commit(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert len(used) == sum("uses" in step for step in steps_of(workflow)) > 0
    assert [action for action in used if not PINNED.fullmatch(action)] == []


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_make_has_the_targets_that_are_called(text):
    for target in re.findall(r"^[^#\n]*\bmake ([\w-]+)", text.read_text(), re.MULTILINE):
        made = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr


def test_together_they_run_all_tests_but_those_that_need_servers():
    commands = {step.get("run") for workflow in WORKFLOWS for step in steps_of(workflow)}
    assert {"make test", "make test-frameworks"} < commands


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_files_that_are_called_exist(workflow):
    called = re.findall(r"python ([\w/]+\.py)", workflow.read_text())
    assert [name for name in called if not (REPOSITORY / name).is_file()] == []
