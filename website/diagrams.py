"""Draws the diagrams of the pages: ``python website/diagrams.py`` writes them to docs/images/.

They are SVG files, so they need nothing from elsewhere, can be searched, and are sharp at any size. Each is drawn for a
width of 480 pixels, of which a phone shows three quarters, and no text is smaller than 13. Their colours follow the reader's
choice of light or dark, on a background of their own.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "images"
PACKAGE = FOLDER.parents[1] / "metaflow_extensions" / "torchrun" / "plugins" / "torchrun"
_NAME = "metaflow_extensions.torchrun.plugins.torchrun"
WIDTH = 480
_LEFT, _RIGHT = 110, 370  # where the lanes of two nodes are
_STYLE = """
  text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1f2430 }
  .small { font-size: 13px; fill: #4b5364 } .bold { font-weight: 600 } .middle { text-anchor: middle }
  .end { text-anchor: end } .page { fill: #f7f8fb } .box { fill: #ffffff; stroke: #8b93a7 }
  .ours { fill: #e3e8ff; stroke: #4c5fd5 } .theirs { fill: #e2f4ea; stroke: #2f8f5b }
  .bad { fill: #fde5e3; stroke: #c63d32 } .line { stroke: #6a7285; fill: none; stroke-width: 1.5 }
  .dashed { stroke-dasharray: 4 4 } .head { fill: #6a7285 } .cross { stroke: #c63d32; stroke-width: 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7ef } .small { fill: #aab2c5 } .page { fill: #191c25 }
    .box { fill: #262a36; stroke: #6f788e } .ours { fill: #2b3358; stroke: #8796f5 }
    .theirs { fill: #1f3d2e; stroke: #5cc08a } .bad { fill: #4a2422; stroke: #ef7a70 }
    .line { stroke: #98a1b6 } .head { fill: #98a1b6 } .cross { stroke: #ef7a70 }
  }
"""


class Drawing:
    """One picture, as the parts that were added to it."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, kind: str = "box", dashed: bool = False) -> None:
        """Add a box: of Metaflow (``box``), of ours (``ours``), of torch (``theirs``), or one that has failed (``bad``)."""
        style = f"{kind} dashed" if dashed else kind
        self._parts.append(f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')

    def text(self, x: int, y: int, words: str, style: str = "") -> None:
        """Add a line of text whose baseline is at `y`."""
        self._parts.append(f'<text class="{style}" x="{x}" y="{y}">{escape(words)}</text>')

    def label(self, x: int, y: int, width: int, height: int, words: str, kind: str = "box") -> None:
        """Add a box with lines of text in its middle, the first of them bold."""
        self.box(x, y, width, height, kind)
        lines = words.split("\n")
        first = y + height // 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            style = "middle small" if number else "middle bold"
            self.text(x + width // 2, first + 18 * number, line, style)

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Add an arrow along points."""
        style = "line dashed" if dashed else "line"
        start = ' marker-start="url(#head)"' if both else ""
        way = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="{style}" points="{way}" marker-end="url(#head)"{start}/>')

    def line(self, *points: tuple[int, int], style: str = "line") -> None:
        """Add a line along points."""
        self._parts.append(f'<polyline class="{style}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')

    def cross(self, x: int, y: int) -> None:
        """Mark an end that nobody wanted."""
        self.line((x - 6, y - 6), (x + 6, y + 6), style="cross")
        self.line((x - 6, y + 6), (x + 6, y - 6), style="cross")

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        head = '<path class="head" d="M0,0 L8,4 L0,8 z"/>'
        marker = (
            f'<marker id="head" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">{head}'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{_STYLE}</style>",
                f"<defs>{marker}</marker></defs>",
                f'<rect class="page" width="{WIDTH}" height="{self._height}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def gang() -> Drawing:
    """Where everything is: the flow, its tasks, and what runs in them."""
    it = Drawing("A flow, the tasks of its step, and what runs in them", 400)
    it.label(150, 14, 180, 44, "flow.py\nnum_parallel=2")
    it.arrow((200, 58), (120, 96))
    it.arrow((280, 58), (360, 96))
    for x, node in ((10, 0), (254, 1)):
        it.box(x, 98, 216, 206)
        it.text(x + 12, 120, f"node {node}" + (", the control node" if node == 0 else ""), "bold")
        it.label(x + 10, 132, 196, 48, "the step's code\ncurrent.torch.run(…)", "ours")
        it.arrow((x + 108, 180), (x + 108, 202))
        it.label(x + 10, 204, 196, 30, "torchrun", "theirs")
        for number in (0, 1):
            left = x + 10 + 101 * number
            it.arrow((left + 47, 234), (left + 47, 256))
            it.label(left, 258, 95, 36, f"rank {2 * node + number}", "theirs")
    it.arrow((218, 156), (262, 156), both=True)
    it.arrow((118, 294), (118, 334), (362, 334), (362, 296), both=True)
    it.text(240, 328, "gloo, NCCL", "small middle")
    for x, kind, words in (
        (16, "box", "Metaflow"),
        (112, "ours", "ours: channel, supervision"),
        (336, "theirs", "torch"),
    ):
        it.box(x, 364, 16, 16, kind)
        it.text(x + 24, 377, words, "small")
    return it


def node() -> Drawing:
    """The processes of one node, and who ends whom."""
    it = Drawing("The processes of a node", 390)
    it.box(12, 12, 196, 52)
    it.text(24, 34, "Metaflow's task", "bold")
    it.text(24, 53, "the step's code", "small")
    it.arrow((110, 66), (110, 154), both=True)
    rows = [
        ("ours", "process between", "ends everything below it, if the supervisor is killed"),
        ("ours", "supervisor", "runs the launches, reads the output, talks to the other nodes"),
        ("theirs", "agent", "python -m torch.distributed.run"),
    ]
    for number, (kind, name, what) in enumerate(rows):
        x, y = 12 + 26 * number, 84 + 72 * number
        it.box(x, y, 468 - x, 52, kind)
        it.text(x + 14, y + 22, name, "bold")
        it.text(x + 14, y + 41, what, "small")
        it.arrow((x + 13, y + 52), (x + 13, y + 98), (x + 25, y + 98))
    it.line((77, 322), (77, 374), (376, 374))
    it.arrow((376, 374), (376, 350))
    for number in (0, 1):
        it.label(90 + 192 * number, 300, 186, 48, f"worker, rank {number}\na script or a function", "theirs")
    return it


def _lanes(it: Drawing, height: int) -> None:
    """Draw the lanes of two nodes."""
    for x, name in ((_LEFT, "control node"), (_RIGHT, "every other node")):
        it.label(x - 85, 12, 170, 30, name, "ours")
        it.line((x, 48), (x, height), style="line dashed")


def _said(it: Drawing, y: int, words: str, to_right: bool) -> None:
    """Draw a message between the lanes."""
    it.text(240, y - 7, words, "small middle")
    it.arrow(*((_LEFT, y), (_RIGHT, y)) if to_right else ((_RIGHT, y), (_LEFT, y)))


def launch() -> Drawing:
    """The messages of one launch that ends well."""
    it = Drawing("The messages of one launch", 548)
    _lanes(it, 538)
    it.label(150, 62, 180, 46, "datastore\naddress, port, token")
    it.arrow((_LEFT, 85), (148, 85))
    it.arrow((332, 85), (_RIGHT, 85))
    _said(it, 146, "join: it knows the token", False)
    it.text(240, 176, "the step's own code, until run()", "middle")
    _said(it, 212, "ready: versions, script, …", False)
    it.text(240, 236, "all are ready and agree", "middle")
    _said(it, 270, "go: a free port", True)
    for x in (_LEFT, _RIGHT):
        it.label(x - 85, 284, 170, 48, "torchrun, workers\nlines, heartbeats", "theirs")
    _said(it, 370, "ended: exit codes", False)
    it.text(240, 396, "all have ended, all is stored", "middle")
    _said(it, 428, "verdict: the result", True)
    _said(it, 476, "done: the step's code", False)
    _said(it, 522, "leave: artifacts are stored", False)
    return it


def failure() -> Drawing:
    """What happens when a worker fails."""
    it = Drawing("One worker fails, and all nodes stop", 462)
    _lanes(it, 366)
    it.label(_LEFT - 100, 60, 212, 48, "ranks 0 and 1\nwait in an all-reduce", "theirs")
    it.label(_RIGHT - 112, 60, 212, 48, "rank 3: ValueError\nits hook writes it down", "bad")
    it.cross(_RIGHT + 100, 62)
    _said(it, 146, "failed, at once", False)
    _said(it, 184, "stop", True)
    for x in (_LEFT, _RIGHT):
        it.label(x - 100, 200, 200, 48, "SIGTERM, SIGKILL\nnothing is left running", "ours")
    _said(it, 288, "ended: what each left", False)
    it.text(240, 314, "who was first?", "middle")
    _said(it, 346, "verdict: rank 3, ValueError", True)
    it.label(10, 368, 460, 48, "every node raises the same error\nor, with max_restarts: go, with a new port", "bad")
    it.text(240, 444, "measured: all is gone 0.25 s after a worker's death", "small middle")
    return it


def function() -> Drawing:
    """How a function gets to the workers, and its value back."""
    it = Drawing("A function as entrypoint", 262)
    rows = [
        ("the task\nrun(train, {…})", "ours", "call.pkl", "each worker\ncalls train(…)", "theirs", True),
        (
            "result.local_rank(0)\nthis node's values",
            "ours",
            "when asked",
            "a file for each rank\nreturned, or raised",
            "box",
            False,
        ),
        ("other nodes\ngather, exceptions", "ours", "by keys", "the datastore\nwhat others need", "box", False),
    ]
    for number, (left, kind, words, right, other, to_right) in enumerate(rows):
        y = 14 + 84 * number
        it.label(10, y, 184, 48, left, kind)
        it.label(286, y, 184, 48, right, other)
        it.arrow(*((194, y + 24), (284, y + 24)) if to_right else ((286, y + 24), (196, y + 24)))
        it.text(240, y + 16, words, "small middle")
        if number:
            it.arrow((378, y - 36), (378, y - 2))
    return it


def rooms() -> Drawing:
    """Which folder imports which: each line goes down, to what its folder imports and no other line leads to."""
    imports = _imports_of_rooms()
    order = sorted(imports, key=lambda room: (-len(_all_below(room, imports)), room))
    it = Drawing("The folders, and what each imports", 26 + 34 * len(order))
    lanes: list[int] = []  # the row below which each lane is free
    for row, room in enumerate(order):
        y = 14 + 34 * row
        it.label(10, y, 190, 26, room, "ours")
        for below in sorted(_direct(room, imports), key=order.index):
            end = order.index(below)
            lane = next((number for number, free in enumerate(lanes) if free <= row), len(lanes))
            lanes[lane : lane + 1] = [end]
            x = 216 + 13 * lane
            it.arrow((200, y + 16), (x, y + 16), (x, 14 + 34 * end + 9), (202, 14 + 34 * end + 9))
    return it


def _imports_of_rooms() -> dict[str, set[str]]:
    """Return what each folder imports; the modules outside of all folders but the first and the last are left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.parent.relative_to(PACKAGE).as_posix()
        if path.name == "__init__.py" or room == ".":
            continue
        if room.startswith("worker/"):  # these run in other processes, and import nothing of ours
            continue
        known = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                places = [base / alias.name for alias in node.names]
                for place in [base, *places]:
                    folder = place if place.is_dir() else place.parent
                    if folder.is_relative_to(PACKAGE) and any(folder.glob("*.py")):
                        known.add(folder.relative_to(PACKAGE).as_posix())
    return {room: known & found.keys() - {room} for room, known in found.items()}


def _all_below(room: str, imports: dict[str, set[str]]) -> set[str]:
    below = set(imports[room])
    return below.union(*(_all_below(each, imports) for each in below))


def _direct(room: str, imports: dict[str, set[str]]) -> set[str]:
    """Return what a folder imports, without what it would reach by way of another one."""
    return {each for each in imports[room] if not any(each in _all_below(by, imports) for by in imports[room])}


PICTURES = {
    "rooms": rooms,
    "gang": gang,
    "node": node,
    "launch": launch,
    "failure": failure,
    "function": function,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
