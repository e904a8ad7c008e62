"""What a worker's stack says: its place in one line, the user's own frames, and who probably waits for whom. Pure."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeAlias

_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$', re.MULTILINE)
# torch, the standard library, Metaflow and this package; a pod has these two beside the user's files, in a folder named
# metaflow, too (2.19). Not all installed packages: a trainer's loop may be one.
_LIBRARY = re.compile(
    r"(site|dist)-packages/torch/|/lib(64)?/python3\.\d+t?/(?!(site|dist)-packages/)|^<frozen "
    r"|/metaflow_extensions/|/((site|dist)-packages|metaflow|\.mf_code)/metaflow/"
)
# Where a rank waits for other ranks (torch 2.13): collectives, stores and DDP; a backward pass, in which DDP reduces from
# C++; and a device, which waits for NCCL. Only the innermost frame counts: FSDP calls layers from such files, too.
_WAITING = re.compile(
    r"(site|dist)-packages/torch/(distributed(\.|/(?!checkpoint/))|nn/parallel/|autograd/graph\.py|(cuda|accelerator)/__init__\.py)"
)
# faulthandler writes no other characters than ASCII (_Py_DumpASCII in Python/traceback.c, CPython 3.11).
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(0[0-9a-f]|10)[0-9a-f]{4})")


SourceLine: TypeAlias = Callable[[str, int], str]
"""Returns a line of a source file, given path and number; "" where it is not known."""


@dataclass(frozen=True)
class Found:
    """What was found out about one worker."""

    where: str  # where its main thread was, in one line; or why that is not known
    mark: str  # equal marks: the main thread was at the same place, in all its frames; "" where that is not known
    text: str  # the stack, with the innermost frame first; "" where there is none
    line: str = ""  # the source line of `where`, if it could be read
    short: str = ""  # the same for people: the user's own frames with their source lines, and a count of the others
    waits: bool = False  # whether it was in a call that waits for other ranks

    def bounded(self, limit: int) -> Found:
        """Return the same without the end of texts of more than so many characters."""
        return replace(self, text=begin_of(self.text, limit), short=begin_of(self.short, limit))


class _Frame(NamedTuple):
    path: str
    line: str
    function: str

    @property
    def is_own(self) -> bool:
        return not _LIBRARY.search(self.path)

    @property
    def where(self) -> str:
        return f"{os.path.basename(self.path)}:{self.line} in {self.function}"

    def source(self, line_of: SourceLine) -> str:
        is_file = self.path.startswith("/")  # else nobody knows in which folder
        return line_of(self.path, int(self.line)) if self.is_own and is_file and self.line.isdecimal() else ""


def unescaped(text: str) -> str:
    """Return a text of faulthandler with the characters that it has escaped, but for what would steer a terminal."""
    return _ESCAPED.sub(lambda each: char if (char := chr(int(each[0][2:], 16))).isprintable() else each[0], text)


def without_stack(problem: str) -> Found:
    """Return why a worker has no stack."""
    return Found(f"no Python stack: {problem}", "", "")


def read(stack: str, line_of: SourceLine = lambda path, number: "") -> Found:
    """Return where a thread was: the innermost frame of the user's, and the innermost function of all."""
    frames = [_Frame(*map(unescaped, match.group("path", "line", "function"))) for match in _FRAME.finditer(stack)]
    if not frames:
        return Found("no Python frame", "", stack)
    mark = hashlib.sha256(repr(frames).encode()).hexdigest()[:16]
    own = next((frame for frame in frames if frame.is_own), frames[0])
    inner = frames[0].function
    # A module's `forward` that calls torch's says nothing more.
    where = own.where if inner == own.function else f"{own.where} (in {inner})"
    line = own.source(line_of)
    # A wait for an asynchronous operation is in C++, below the user's own line.
    waits = bool(_WAITING.search(frames[0].path)) or (frames[0] is own and ".wait(" in line)
    return Found(where, mark, stack, line, _short(frames, line_of), waits)


def begin_of(text: str, limit: int) -> str:
    """Return a text without what is more than so many characters, and how many those are."""
    return text if len(text) <= limit else f"{text[:limit]}\n… {len(text) - limit} characters are left out here"


def _short(frames: list[_Frame], line_of: SourceLine) -> str:
    """Return the user's own frames, the innermost first, and how many others are between them."""
    told: list[str] = []
    for is_own, some in groupby(frames, lambda frame: frame.is_own):
        group = list(some)
        if is_own:
            told += [f"{each.where}: {source}" if (source := each.source(line_of)) else each.where for each in group]
        else:
            count = f"{len(group)} frame{'s' if len(group) > 1 else ''} of libraries"
            told.append(f"({count}, innermost {group[0].where})")
    if len(told) > 1 and not frames[-1].is_own:
        told.pop()  # they start the program
    return "\n".join(told)


def look_first(ranks: Mapping[int, Found]) -> tuple[list[int], str]:
    """Return the ranks for which the others probably wait, and what the others do; nobody where that can't be told."""
    busy = [rank for rank, found in ranks.items() if not found.waits]
    if 0 < len(busy) < len(ranks):  # many that are busy may wait as well, in a way that their stacks do not show
        return (busy, "the others seem to wait") if len(busy) <= len(ranks) / 2 else ([], "")
    places = Counter(found.where for found in ranks.values())
    place, count = places.most_common(1)[0] if places else ("", 0)
    if len(ranks) / 2 < count < len(ranks):
        return [rank for rank, found in ranks.items() if found.where != place], "most ranks are at another place"
    return [], ""
