"""Writes docs/api.md from the docstrings: ``python website/api.py``. It is plain Markdown, for the site and for GitHub."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metaflow  # noqa: F401 - it imports our modules, so it must come before them

from metaflow_extensions.torchrun.plugins.torchrun import errors
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.outputs import OutputFile, Outputs
from metaflow_extensions.torchrun.plugins.torchrun.result import TorchrunResult
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_FACTS = ("num_nodes", "node_index", "nproc_per_node", "world_size", "main_addr", "is_control")
_BEGIN = """# From the docstrings

The docstrings of `current.torch` and of what can be imported from `metaflow`. `make docs` writes
this page from them. [The reference](reference.md) is shorter.
"""
_HEAD = re.compile(r"^([A-Z]\w+)\n-+\n", re.MULTILINE)  # of a section, as numpydoc has them


def page() -> str:
    """Return the whole page."""
    return "\n".join([_BEGIN, *_parts()])


def _parts() -> Iterator[str]:
    yield "## @torchrun\n"
    yield described(TorchrunDecorator)
    yield "## current.torch\n"
    yield described(TorchrunExecutor)
    yield properties(TorchrunExecutor, _FACTS)
    yield method(TorchrunExecutor, "run")
    yield method(TorchrunExecutor, "card")
    yield "## What run returns\n\n### TorchrunResult\n"
    yield described(TorchrunResult)
    yield method(TorchrunResult, "rank")
    yield method(TorchrunResult, "local_rank")
    yield "### Outputs\n"
    yield described(Outputs)
    yield properties(Outputs, ("nodes", "size", "left_out"))
    yield method(Outputs, "open")
    yield method(Outputs, "download")
    yield "### OutputFile\n"
    yield described(OutputFile)
    yield "## One node\n\n### TorchrunSingleNodeMultiGPU\n"
    yield described(TorchrunSingleNodeMultiGPU)
    yield "### TorchrunSingleNodeMultiGPU.run\n\nTakes and returns what `TorchrunExecutor.run` does.\n"
    yield method(TorchrunSingleNodeMultiGPU, "card")
    yield "## Errors\n"
    yield described(errors)
    yield "### TorchrunError\n"
    yield described(errors.TorchrunError)


def method(cls: type, name: str) -> str:
    """Return a method's heading, signature and docstring."""
    function = getattr(cls, name)
    _, *given = inspect.signature(function).parameters.values()
    arguments = [str(each.replace(annotation=inspect.Parameter.empty)) for each in given]
    line = f"{name}({', '.join(arguments)})"
    if len(line) > 90:
        line = "\n    ".join([f"{name}(", *(f"{each}," for each in arguments)]) + "\n)"
    return f"### {cls.__name__}.{name}\n\n```text\n{line}\n```\n\n{described(function)}"


def properties(cls: type, names: tuple[str, ...]) -> str:
    """Return a list of properties."""
    return "\n".join(_item(f"`{name}`: {inspect.getdoc(getattr(cls, name))}") for name in names) + "\n"


def described(what: Any) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    text = (inspect.getdoc(what) or "").partition("MF Add To Current\n")[0]  # that part is for Metaflow's type stubs
    before, *sections = _HEAD.split(text)
    parts = [_paragraphs(before)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = re.findall(r"^(\S.*)\n((?:[ \t]+.*\n?|\n)*)", body.rstrip() + "\n", re.MULTILINE)
        parts.append(f"**{title}**\n\n" + "\n".join(_entry(head, about) for head, about in entries) + "\n")
    return "\n".join(parts)


def _entry(head: str, about: str) -> str:
    """Return an entry of a section: a name and its type, or a type alone, and what it is."""
    name, colon, kind = head.partition(" : ")
    return _item(f"`{name}`{f' (`{kind}`)' if colon else ''}: {' '.join(about.split())}")


def _item(text: str) -> str:
    return _filled(text, "- ", "  ")


def _paragraphs(text: str) -> str:
    """Return paragraphs; what follows on a double colon is shown as it is."""
    parts: list[str] = []
    for part in filter(None, re.split(r"\n\n+", text.strip("\n"))):
        is_code = part.startswith("    ")
        parts.append(f"```text\n{textwrap.dedent(part)}\n```" if is_code else _filled(part.removesuffix("::")))
    return "\n\n".join(filter(None, parts)) + "\n"


def _filled(text: str, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width=99,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
