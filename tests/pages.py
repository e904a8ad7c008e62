"""The pages of the repository, and their fenced blocks: what a block is, and which test runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "benchmarks")
PAGES = [*REPOSITORY.glob("*.md"), *(page for folder in FOLDERS for page in (REPOSITORY / folder).rglob("*.md"))]
NAMES = sorted(str(page.relative_to(REPOSITORY)) for page in PAGES)
# Stands before a block that no test can run, with the reason; "theirs" is what users of other systems write.
MARK = re.compile(r"<!-- (needs a (cloud|GPU|package index)|theirs) -->\n$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, its text, and what stands before it."""

    page: str
    language: str
    text: str
    before: str

    @property
    def is_marked(self) -> bool:
        return MARK.search(self.before) is not None

    @property
    def kind(self) -> str:
        """Of Python: a ``flow``, a ``step`` of one, or ``lines`` that may stand in a step."""
        if "(FlowSpec)" in self.text:
            return "flow"
        return "step" if self.text.startswith("@") else "lines"


@cache
def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def blocks_of(name: str) -> list[Block]:
    """Return the blocks of a page."""
    text = read(name)
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [Block(name, match[2], match[3], text[: match.start()]) for match in found]


# Python that does not stand in `flow_of_pages`, since a test of its own runs it or what it shows: page -> first lines.
_RUN_ELSEWHERE = {
    "README.md": ["from metaflow import FlowSpec, Parameter, card, current, step, torchrun"],
    "docs/before-run.md": ["from metaflow import current", "import sys"],
    "docs/checkpoints.md": ["@retry(times=2)", "from metaflow import Checkpoint", "import os"],
    "docs/failures.md": ["import sys"],
    "docs/frameworks.md": [
        'current.torch.run("train.py", env={"WANDB_MODE": "offline"}, outputs=["wandb/"])',
        "from lightning.pytorch import Callback",
        "from metaflow_torchrun import stopping",
        "import os",
    ],
    "docs/from-one-gpu.md": [
        '"""Runs after.py on two nodes with two processes each; the model is stored with the run."""',
        "import os",
    ],
    "docs/functions.md": ["def train(epochs, lr):"],
    "docs/hangs.md": ["import os"],
    "docs/kubernetes.md": ["from metaflow import FlowSpec, batch, current, kubernetes, retry, step, torchrun"],
    "docs/metrics.md": [
        "from lightning.pytorch import Callback",
        "from transformers import TrainerCallback",
        "import time",
        "try:",
    ],
    "docs/outputs.md": ["from metaflow import Run"],
    "docs/start.md": ['@card(type="torchrun")', "from metaflow import Flow", "import argparse"],
}
RUN_ELSEWHERE = {(page, line) for page, lines in _RUN_ELSEWHERE.items() for line in lines}


def python_of_pages() -> list[Block]:
    """Return the blocks of Python that need nothing that tests don't have; tests of examples run those of examples."""
    blocks = [block for name in NAMES if not name.startswith("examples/") for block in blocks_of(name)]
    return [block for block in blocks if block.language == "python" and not block.is_marked]


def key(block: Block) -> tuple[str, str]:
    return block.page, block.text.partition("\n")[0]


def run_in_one_flow() -> list[Block]:
    """Return the steps and lines that the flow of `flow_of_pages` runs."""
    return [each for each in python_of_pages() if key(each) not in RUN_ELSEWHERE and each.kind != "flow"]


_HEAD = """
import os

from metaflow import FlowSpec, TorchrunSingleNodeMultiGPU, card, current, retry, step, torchrun
from metaflow.cards import Markdown


def train(slope):
    return slope * int(os.environ["RANK"])


"""
_AROUND = """
    @step
    def before_{number}(self):
        self.next(self.train_{number}, num_parallel={nodes})

    @step
    def join_{number}(self, inputs):
        self.next(self.together)
"""
_END = """
    @step
    def together(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    Pages()
"""


def indented(text: str) -> str:
    return "".join(" " * 4 * bool(line.strip()) + line for line in text.splitlines(keepends=True))


def flow_of_pages() -> str:
    """Return one flow with all steps of the pages, each a branch with a gang of one node, or as many as it says.

    One more step has all lines, but those of a single node: `start` has them, which is no gang.
    """
    blocks = run_in_one_flow()
    steps = [block.text for block in blocks if block.kind == "step"]
    lines = [block for block in blocks if block.kind == "lines"]
    calls = {"here": "", "in a gang": ""}
    for number, block in enumerate(lines):
        where = "here" if "TorchrunSingleNodeMultiGPU" in block.text else "in a gang"
        calls[where] += f"lines_{number}(self)\nprint('ran', {key(block)!r})\n"
    steps.append(f"@torchrun\n@step\ndef train(self):\n{indented(calls['in a gang'])}")
    text = _HEAD + "".join(f"def lines_{number}(self):\n{indented(each.text)}\n\n" for number, each in enumerate(lines))
    branches = ", ".join(f"self.before_{number}" for number in range(len(steps)))
    start = f"@step\ndef start(self):\n{indented(calls['here'])}    self.next({branches})\n"
    text += f"class Pages(FlowSpec):\n{indented(start)}"
    for number, each in enumerate(steps):
        whole = each if "self.next(" in each else f"{each}    self.next(self.join)\n"
        named = whole.replace("def train(self)", f"def train_{number}(self)").replace(
            "self.join)", f"self.join_{number})"
        )
        said = re.search(r"num_parallel=(\d+)", each)
        text += "\n" + indented(named) + _AROUND.format(number=number, nodes=said[1] if said else 1)
    return text + _END


def built_site(folder: Path) -> Path:
    """Build the site as `make docs` does, and return where it is; a warning of mkdocs is an error."""
    site = folder / "site"
    # With --quiet, mkdocs 1.6 does not count the warnings that --strict refuses.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return site
