"""The page of a gang, made from its view; the same page for a terminal and for a card. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..elements.charts import COLOURS, frame, time_axis, time_unit
from ..elements.model import Block, Cell, Cells, Chart, Code, Facts, Keys, Link, Page, Part, Section, Sentence, Table
from ..gang.cause import signal_name
from ..gang.texts import counted, duration, names, shortened, size_text
from ..gang.view import FailureReport, GangView, NodeView
from . import progress_part, usage_part
from .words import Rank, RankState, outcome_of, ranks_of, sentence, timeline

# More ranks become a cell for each node, and more nodes one without words of its own.
_MAX_CELLS = 64
# A page that has little space lists so many nodes, those that need a look, and so many rows of what happened.
_MAX_NODES, _FIRST_ROWS, _LAST_ROWS = 64, 20, 80
_MAX_REPORTS, _MAX_CHARS = 5, 32_000  # of former failures, and characters of each report
_OUTPUT_LAUNCHES, _OUTPUT_FILES = 20, 5  # the last launches, and the first files of each
_HANG = (
    "The ranks of launch {} when it hung: your own frames of each stack, the innermost first. "
    "torchrun show --json has more of each stack."
)
_CODES = 4  # so many exit codes of a node are shown one by one
# In which order states are told; the first that a node has gives its cell the colour.
_ORDER: tuple[RankState, ...] = (
    "failed", "lost", "stopping", "restarting", "starting", "waiting", "running", "stopped", "done",
)  # fmt: skip
_FACTS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "python": "Python", "devices": "devices"}
_NARROWEST = 1 / 2000  # a state that took less of the time is less than a pixel wide, and needs no legend
_OF_DEVICES = ("cuda", "nccl", "devices")
_FULL_STEP, _HEIGHT, _MIN_STEP = 24, 420, 2  # of a node's line in the chart of all times


@dataclass(frozen=True)
class Place:
    """The place of one attempt of a gang in Metaflow: its run, step, tasks and links."""

    flow: str
    run: str
    step: str
    control_task: str
    tasks: dict[int, str] = field(default_factory=dict)  # by node; a card has those of the view
    attempt: int = 0
    last_attempt: int = 0
    is_done: bool = False  # whether Metaflow knows of the attempt's end
    clone: tuple[str, str] | None = None  # run and control task of the clone of it that was asked for
    ui_url: str | None = None  # of Metaflow's UI
    program: str = "python flow.py torchrun"  # how our commands are called
    typed: str = ""  # the command that shows this page, which it need not name
    names_task: bool = False  # whether commands name the control task, since the step has several gangs

    @property
    def is_over(self) -> bool:
        """Whether the control node's task has ended."""
        return self.is_done or self.attempt < self.last_attempt

    @property
    def title(self) -> str:
        """Name the gang, and of what run's step it was cloned."""
        tries = f", attempt {self.attempt}" if self.last_attempt else ""
        latest = f" (the latest is {self.last_attempt})" if self.attempt < self.last_attempt else ""
        clone = f", which run {self.clone[0]} has cloned as task {self.clone[1]}" if self.clone else ""
        return f"{self.flow}, run {self.run}, step {self.step}, task {self.control_task}{tries}{latest}{clone}"

    def command(self, name: str) -> str:
        """Return one of our commands for the gang."""
        which = f" --attempt {self.attempt}" if self.attempt < self.last_attempt else ""
        of_task = f"/{self.control_task}" if self.names_task else ""
        return f"{self.program} {name} {self.run}/{self.step}{of_task}{which}"

    def commands(self, view: GangView) -> str:
        """Return the commands that show more of the gang, one on each line; others stand in their sections."""
        found = [self.command(name) for name in ("show", "logs") if name != self.typed]
        rank = (view.cause or {}).get("rank")
        return "\n".join([*found, *([f"{found[-1]} --rank {rank}"] if rank is not None else [])])

    def task(self, pathspec: str) -> Link:
        """Return the link to a task of this flow, which is named as run, step and task."""
        whole = f"{self.flow}/{pathspec}"
        return Link(whole, f"{self.ui_url.rstrip('/')}/{whole}" if self.ui_url else None)

    def now(self, view: GangView, now: float) -> GangView:
        """Return the view as of now, in seconds since 1970, if the gang may still run."""
        return view if self.is_over or not view.began else view.at(now - view.began)

    def outcome(self, view: GangView) -> str:
        """Return ``done`` or ``failed``, the same as the view while the gang runs, or ``ended`` if none knows how."""
        is_cut = self.is_over and not view.is_over and view.outcome != "failed"
        return "ended" if is_cut else outcome_of(view)

    def sentence(self, view: GangView) -> str:
        """Return what came of a gang, and why if it failed, in one line."""
        if self.outcome(view) != "ended":
            return sentence(view)
        # It is stored every few seconds, so the last of it can be missing.
        unknown = "The task of the control node (node 0) has ended, but has not recorded how."
        return f"{unknown} The last that is known, of {_moment(view.began + view.now_s)}: {sentence(view)}"


@dataclass(frozen=True)
class _Shown:
    """The data from which sections are made."""

    view: GangView
    place: Place
    is_short: bool  # whether the page has little space
    ranks: list[Rank]

    def cut(self, text: str) -> str:
        """Return a text, of a long one its begin where there is little space."""
        more = len(text) - _MAX_CHARS
        return f"{text[:_MAX_CHARS]}\n… {more} characters are left out here" if self.is_short and more > 0 else text


def page_of(view: GangView, place: Place, is_short: bool = False) -> Page:
    """Return the page of a gang; one that `is_short` leaves out what is more than a card should hold."""
    shown = _Shown(view, place, is_short, ranks_of(view))
    return Page(place.title, tuple(Section(name, *make(shown)) for name, make in _SECTIONS.items()))


# --- the outcome ------------------------------------------------------------------------------------


def _outcome(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    view, said = shown.view, shown.place.sentence(shown.view)
    parts: list[Part] = [
        Sentence(shown.place.title + _as_of(view), "headline"),
        Sentence(said, "outcome", outcome_of(view)),
    ]
    before = list(view.reports)
    is_failure = view.error is not None or view.outcome == "failed"
    if is_failure and before and before[-1].error is not None:
        last = before.pop()
        text = _without_first(last.text, said)
        parts += [Block("Cause" if last.cause is not None else "Error", (Code(shown.cut(text)),))] if text else []
        if last.cause is not None and last.cause.get("stdout"):
            title = f"Last lines of rank {last.cause['rank']}'s stdout"
            parts.append(Block(title, (Code(last.cause["stdout"]),)))
    most = _MAX_REPORTS if shown.is_short else len(before)
    parts += [_former(shown, each) for each in before[::-1][:most]]
    if len(before) > most:
        parts.append(Sentence(f"{len(before) - most} earlier failures are not shown here."))
    return "", tuple(parts)


def _without_first(text: str, sentence: str) -> str:
    """Return a report without its first line if the sentence above it has said that."""
    first, _, rest = text.partition("\n")
    return rest if first.rstrip(".") in sentence else text


def _as_of(view: GangView) -> str:
    moment = time.gmtime(view.began + view.seconds)
    return time.strftime(", as of %H:%M:%S UTC", moment) if view.began else ""


def _former(shown: _Shown, report: FailureReport) -> Block:
    """Return a failure that was not the end of it."""
    what, _, text = report.text.partition("\n")
    after = "All workers were started again after this." if report.error is None else f"run raised {report.error}."
    code = [Code(shown.cut(text))] if text else []
    return Block(f"After {duration(report.at_s)}: {what}", (Sentence(after), *code), is_folded=True)


# --- ranks and nodes --------------------------------------------------------------------------------


def _tally(ranks: Iterable[Rank]) -> dict[RankState, str]:
    """Return how many ranks are in which state, the worst first."""
    found = Counter(rank.state for rank in ranks)
    return {state: f"{found[state]} {state}" for state in _ORDER if found[state]}


def _ranks(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    view, ranks = shown.view, shown.ranks
    if not ranks:
        cells = (Cell(f"node {each}", "waiting", node.state, _host(node)) for each, node in enumerate(view.nodes))
        return "Ranks", (Sentence("No launch has begun, so there are no ranks."), Cells(tuple(cells)))
    tally = _tally(ranks)
    legend = Keys(tuple((text, state) for state, text in tally.items()), ", ".join(tally.values()))
    is_known = shown.place.outcome(view) != "ended"
    head = (legend,) if is_known else (legend, Sentence("These are the last known states."))
    marks = _marks(view)
    if len(ranks) <= _MAX_CELLS:
        cells = (_rank_cell(rank, view.nodes[rank.node], marks) for rank in ranks)
        return "Ranks", (*head, Cells(tuple(cells)))
    by_node: dict[int, list[Rank]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    cells = (_node_cell(node, view.nodes[node].host, of_node, marks) for node, of_node in by_node.items())
    return "Ranks", (*head, *_bad(ranks), Cells(tuple(cells), is_small=len(by_node) > _MAX_CELLS))


def _marks(view: GangView) -> dict[int, str]:
    """Return which ranks to look at first, in a hang that was the end."""
    hangs = view.hangs or {}
    is_last = bool(hangs) and hangs["is_last"] and view.outcome == "failed" and view.launch == hangs["launch"]
    return dict.fromkeys(hangs["first"] if is_last else (), "look here first")


def _host(node: NodeView) -> str:
    return node.host or "no host yet"


def _rank_cell(rank: Rank, node: NodeView, marks: Mapping[int, str]) -> Cell:
    code = rank.exit_code
    end = "" if not code else f", exit code {code}" if code >= 0 else f", {signal_name(-code)}"
    if rank.state == "running" and not node.has_written:
        end = ", no output yet"
    place = f"node {rank.node}, {_host(node)}"
    return Cell(f"rank {rank.rank}", rank.state, rank.state + end, place, marks.get(rank.rank, ""))


def _node_cell(node: int, host: str, ranks: list[Rank], marks: Mapping[int, str]) -> Cell:
    tally = _tally(ranks)
    mark = ", ".join(f"rank {rank.rank} {marks[rank.rank]}" for rank in ranks if rank.rank in marks)
    return Cell(f"node {node}", next(iter(tally)), ", ".join(tally.values()), host, mark)


def _bad(ranks: list[Rank]) -> list[Part]:
    """Name the ranks that failed or were lost, which a small cell only colours."""
    lines: list[Part] = []
    for state in ("failed", "lost"):
        if found := [rank for rank in ranks if rank.state == state]:
            nodes = names(sorted({rank.node for rank in found}))
            lines.append(Sentence(f"{state}: {names((rank.rank for rank in found), 'rank')} on {nodes}"))
    return lines


def _nodes(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    nodes, title = list(range(len(shown.view.nodes))), "Nodes"
    if shown.is_short and len(nodes) > _MAX_NODES:
        title = "Node 0, and nodes that need a look"
        odd = {0, *(rank.node for rank in shown.ranks if rank.state in ("failed", "lost"))}
        odd |= {node for node in nodes if shown.view.nodes[node].state in ("not joined yet", "lost")}
        nodes = sorted(odd)[:_MAX_NODES]
    rows = tuple(_node_row(shown, node) for node in nodes)
    what = "The gang is all nodes of one attempt of the step. Node 0 is the control node, which decides for all."
    header = ("node", "host", "task", "ranks", "state", "exit codes")
    return title, (Table(header, rows, right=("node",)), Sentence(what, "note"))


def _node_row(shown: _Shown, index: int) -> tuple[str | Link, ...]:
    view, node = shown.view, shown.view.nodes[index]
    ranks = view.ranks_of(index)
    numbers = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else shortened(ranks)
    ends = exit_codes([node.exit_codes.get(rank) for rank in ranks]) if node.exit_codes else ""
    return (str(index), node.host, _task(shown, index), numbers, node.state, ends)


def _task(shown: _Shown, node: int) -> str | Link:
    """Return the task of a node, as a link where Metaflow's UI is known."""
    place, found = shown.place, shown.view.nodes[node].task
    if node in place.tasks:
        found = f"{place.run}/{place.step}/{place.tasks[node]}"
    return "-" if found is None else Link(found.split("/")[-1], place.task(found).url)


def exit_codes(codes: Sequence[int | None]) -> str:
    """Return how the ranks of a node ended, in the order of ranks, or of many how many ended in which way."""
    words = ["unknown" if code is None else str(code) if code >= 0 else signal_name(-code) for code in codes]
    if len(words) <= _CODES:
        return " ".join(words)
    return ", ".join(f"{count} x {word}" for word, count in Counter(words).most_common())


# --- what happened when -----------------------------------------------------------------------------


def _timeline(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    rows = timeline(shown.view)
    more = len(rows) - _FIRST_ROWS - _LAST_ROWS
    if shown.is_short and more > 0:
        rows = [*rows[:_FIRST_ROWS], ("", "", f"{more} lines are left out here"), *rows[-_LAST_ROWS:]]
    table = Table(("seconds", "launch", "what happened"), tuple(rows), right=("seconds",))
    return "Timeline", (Chart(_times(shown.view)), table)


def _times(view: GangView) -> dict[str, Any]:
    """Return the chart of all times: a line for each node, a colour for each state."""
    end_s = view.seconds
    unit_s, _ = time_unit(end_s)
    rows = [
        {
            "node": index,
            "host": node.host,
            "state": state,
            "from": round(begin_s / unit_s, 3),
            "to": round(min(until_s, end_s) / unit_s, 3),
        }
        for index, node in enumerate(view.nodes)
        for (state, begin_s), until_s in zip(node.since, [*(at for _, at in node.since[1:]), end_s], strict=True)
        if state not in ("finished", "failed") and min(until_s, end_s) - begin_s >= end_s * _NARROWEST
    ]
    states = [state for state in COLOURS if any(row["state"] == state for row in rows)]
    colours = {"domain": states, "range": [COLOURS[state] for state in states]}
    nodes = list(range(len(view.nodes)))
    step = max(_MIN_STEP, min(_FULL_STEP, _HEIGHT // max(1, len(nodes))))
    labels = {"title": "node", "labelOverlap": True, "ticks": False, "domain": False}
    told = ("node", "host", "state", "from", "to")
    legend = {"orient": "top", "title": None, "columns": 4}
    return {
        **frame(height={"step": step}),
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.8 if step > 8 else 1.0}},
        "encoding": {
            "y": {"field": "node", "type": "ordinal", "scale": {"domain": nodes, "padding": 0}, "axis": labels},
            "x": {"field": "from", **time_axis(end_s, {"tickCount": 6})},
            "x2": {"field": "to"},
            "color": {"field": "state", "type": "nominal", "scale": colours, "legend": legend},
            "tooltip": [{"field": name} for name in told],
        },
    }


def _launch(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    view = shown.view
    # Without an accelerator it does not matter for which PyTorch was built.
    function, has_devices = view.facts.get("function", ""), view.facts.get("devices") != "none"
    facts = {name: text for name, text in view.facts.items() if has_devices or name not in _OF_DEVICES}
    whole = "so far" if view.trained_s is None else "with start" if view.launch == 0 else "the whole step"
    left = "" if view.restarts_left is None else f" ({view.restarts_left} left in launch {view.launch})"
    rows = [
        ("started", _moment(view.began) if view.began else ""),
        ("trained", "" if view.trained_s is None else duration(view.trained_s)),
        (whole, duration(view.seconds)),
        ("nodes", str(len(view.nodes))),
        ("ranks on each", str(view.nproc or "")),
        ("launch", "" if view.launch is None else str(view.launch)),
        ("restarts", f"{len(view.restarts_s)}{left}"),
        ("function", function),
        ("entrypoint and arguments", "" if function else (view.command or "").partition(" -- ")[2]),
        *((title, facts.get(name, "")) for name, title in _FACTS.items()),
    ]
    # Of a function, the command names a script of ours and a folder that is gone.
    command = [Code(view.command, "Command on node 0")] if view.command and not function else []
    return "Launch", (Facts(tuple(rows)), *command, Code(shown.place.commands(view), "Commands that show more"))


# --- what the workers and nodes have told -----------------------------------------------------------


def _progress(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    return "Progress", tuple(progress_part.parts(shown.view))


def _hangs(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    """Return where the ranks were in the last hang."""
    kept = shown.view.hangs
    if kept is None:
        return "Hangs", ()
    blocks = (
        Block(f"{names(each['ranks'], 'Rank')}: {each['where']}", (Code(each["short"] or each["text"]),))
        for each in kept["stacks"]
        if each["text"]
    )
    return "Hangs", (Sentence(_HANG.format(kept["launch"])), *blocks)


def _outputs(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    """Return what each launch has stored."""
    rows = []
    for launch, nodes in list(shown.view.outputs.items())[-_OUTPUT_LAUNCHES:]:
        files, size = (sum(each[name] for each in nodes.values()) for name in ("files", "size"))
        known = [name for each in nodes.values() for name in each["names"]][:_OUTPUT_FILES]
        named = f": {', '.join([*known, *(['…'] if len(known) < files else [])])}" if known else ""
        rows.append((f"launch {launch}", f"{counted(files, 'file')}, {size_text(size)}{named}"))
    command = Code(shown.place.command("outputs"), "Command that shows more")
    return "Outputs", (Facts(tuple(rows)), command) if rows else ()


def _usage(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    return "Usage", tuple(usage_part.parts(shown.view.usage))


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# All sections in their order: what makes each, as a title and parts. One without a title stands by itself.
_SECTIONS: dict[str, Callable[[_Shown], tuple[str, tuple[Part, ...]]]] = {
    "outcome": _outcome,
    "hangs": _hangs,
    "progress": _progress,
    "ranks": _ranks,
    "timeline": _timeline,
    "usage": _usage,
    "nodes": _nodes,
    "outputs": _outputs,
    "launch": _launch,
}
SECTION_NAMES = tuple(_SECTIONS)
"""The names of all sections, in their order on the page."""
