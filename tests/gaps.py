"""Tests that this machine can't run: what can be installed must not be missing in CI.

There ``CI`` is set, by `.ci/run` and by GitHub, and a test that skips hides a gap. So it fails, and says what is
missing. By nature some can't run on a machine: without a GPU, or with another kernel. Those skip anywhere.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


def gap(what: str, remedy: str = "") -> NoReturn:
    """Skip the test for want of something that can be installed; in CI, fail it."""
    if IN_CI:
        pytest.fail(f"{what} In CI no test may be left out for that. {remedy}", pytrace=False)
    pytest.skip(f"{what} {remedy}")
