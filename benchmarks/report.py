"""What a benchmark tells: figures, each with its target if it has one, and facts of the machine; as a table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Figure:
    """Something that was measured several times; the median counts."""

    what: str
    values: tuple[float, ...]
    unit: str  # empty for a ratio
    target: float | None = None
    at_least: bool = False  # whether more is better

    @property
    def met(self) -> bool | None:
        """Whether it is as good as it should be; None where nothing says how good that is."""
        if self.target is None:
            return None
        median = statistics.median(self.values)
        return median >= self.target if self.at_least else median <= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        told = {"median": statistics.median(self.values), "least": min(self.values), "most": max(self.values)}
        return {**vars(self), **told, "met": self.met, "row": self.as_row()}

    def as_row(self) -> list[str]:
        """Return it as the table has it, under `HEAD`."""
        unit = f" {self.unit}" if self.unit else ""
        limit = "" if self.target is None else f"{'>=' if self.at_least else '<='} {_short(self.target)}{unit}"
        spread = f"{_short(min(self.values))} to {_short(max(self.values))}" if len(self.values) > 1 else ""
        verdict = {True: "met", False: "**not met**", None: ""}[self.met]
        return [
            self.what,
            f"{_short(statistics.median(self.values))}{unit}",
            spread,
            str(len(self.values)),
            limit,
            verdict,
        ]


HEAD = ("what", "median", "from … to", "times", "target", "")


class Report:
    """The figures of one benchmark, and what they depend on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self._facts = machine_facts()

    def add(
        self, what: str, values: Iterable[float], unit: str = "s", target: float | None = None, at_least: bool = False
    ) -> None:
        """Add a figure; `unit` is empty for a ratio."""
        self.figures.append(Figure(what, tuple(values), unit, target, at_least))

    def note(self, text: str) -> None:
        """Add a line, for example what was skipped and why."""
        self.notes.append(text)

    def finish(self, path: Path | None = None) -> None:
        """Print all, and write it to a file as JSON."""
        facts = {**self._facts, "load after": load()}
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        for line in [*table(HEAD, [figure.as_row() for figure in self.figures]), *self.notes]:
            print(line, flush=True)
        if path is not None:
            figures = [figure.as_dict() for figure in self.figures]
            told = {"benchmark": self.name, "facts": facts, "figures": figures, "notes": self.notes}
            path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def parser(description: str | None, rounds: int | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have, and one for each default; for a list, of one value or more.

    `rounds` only where variants are measured in turns.
    """
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, help="file for all figures")
    for name, default in {**({} if rounds is None else {"rounds": rounds}), **defaults}.items():
        several = {"nargs": "+", "type": type(default[0])} if isinstance(default, list) else {"type": type(default)}
        options.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default: {default}", **several)
    return options


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table that a terminal and a page in Markdown show alike."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, ["-" * width for width in widths], *rows]:
        yield "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |"


def machine_facts() -> dict[str, str | int]:
    """Return what figures depend on."""
    facts: dict[str, str | int] = {
        "CPU": _first_of("grep", "-m1", "model name", "/proc/cpuinfo").partition(":")[2].strip() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": _first_of("nvidia-smi", "--list-gpus") or "none",
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "Python": platform.python_version(),
    }
    for name in ("torch", "metaflow"):
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return {**facts, "load before": load()}


def load() -> str:
    """Return the average number of threads that ran or wanted to, over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _first_of(*command: str) -> str:
    """Return the first line that a command writes; nothing where there is no such command."""
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return ""


def _short(value: float) -> str:
    """Return about three digits that count, and all of a large number's."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
