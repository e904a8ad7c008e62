"""A type checker sees what a function's launch returns, and wrong arguments."""

import re
import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parent / "typed" / "functions.py"
CONFIG = Path(__file__).parents[2] / "pyproject.toml"
LINES = SAMPLE.read_text(encoding="utf-8").splitlines()


def test_mypy_sees_types_and_mistakes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        CONFIG,
        "--cache-dir",
        tmp_path,
        "--no-error-summary",
        SAMPLE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONFIG.parent, check=False)
    revealed, wrong = {}, set()
    for line, kind, text in re.findall(r"functions\.py:(\d+): (error|note): (.*)", done.stdout):
        shown = re.match(r'Revealed type is "(.*)"$', text)
        if shown:
            revealed[int(line)] = re.sub(r"\b(\w+\.)+(?=\w)", "", shown[1])
        elif kind == "error":
            wrong.add(int(line))
    expected = {number: line.partition("# is ")[2] for number, line in enumerate(LINES, 1) if "# is " in line}
    assert len(expected) == 15
    assert revealed == expected, done.stdout + done.stderr
    assert wrong == {number for number, line in enumerate(LINES, 1) if line.endswith("# wrong")}, done.stdout
