"""The page of a gang, made from its `Snapshot`; the same page for a terminal and for a card. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..elements.charts import COLOURS, frame, time_axis, time_unit
from ..elements.model import Block, Cell, Cells, Chart, Code, Facts, Keys, Link, Page, Part, Section, Sentence, Table
from ..gang.cause import signal_name
from ..gang.history import Report
from ..gang.texts import duration, names, shortened
from ..records.on_page import NO_PAGES, Pages
from ..records.snapshot import Snapshot
from ..records.summary import Node, Rank, RankState, Summary
from .timeline import timeline

# More ranks become a cell for each node, and more nodes one without words of its own.
_MAX_CELLS = 64
# A page that has little space lists so many nodes, those that need a look, and so many rows of what happened.
_MAX_NODES, _FIRST_ROWS, _LAST_ROWS = 64, 20, 80
_MAX_REPORTS, _MAX_CHARS = 5, 32_000  # of former failures, and characters of each report
_CODES = 4  # so many exit codes of a node are shown one by one
# In which order states are told; the first that a node has gives its cell the colour.
_ORDER: tuple[RankState, ...] = (
    "failed", "lost", "stopping", "restarting", "starting", "waiting", "running", "stopped", "done",
)  # fmt: skip
_ENDED = ("done", "failed", "stopped", "lost")
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
    tasks: dict[int, str] = field(default_factory=dict)  # by node; a card has those of the snapshot
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

    def commands(self, snapshot: Snapshot) -> str:
        """Return the commands that show more of the gang, one on each line; a feature's own stands in its section."""
        found = [self.command(name) for name in ("show", "logs") if name != self.typed]
        rank = (snapshot.cause or {}).get("rank")
        return "\n".join([*found, *([f"{found[-1]} --rank {rank}"] if rank is not None else [])])

    def task(self, pathspec: str) -> Link:
        """Return the link to a task of this flow, which is named as run, step and task."""
        whole = f"{self.flow}/{pathspec}"
        return Link(whole, f"{self.ui_url.rstrip('/')}/{whole}" if self.ui_url else None)

    def now(self, snapshot: Snapshot, now: float) -> Snapshot:
        """Return the snapshot as of now, in seconds since 1970, if the gang may still run."""
        is_over = self.is_over or snapshot.began is None or snapshot.summary.is_over
        return snapshot if is_over else snapshot.at(now - (snapshot.began or 0.0))

    def outcome(self, summary: Summary) -> str:
        """Return ``done`` or ``failed``, the same as the summary while the gang runs, or ``ended`` if none knows how."""
        is_cut = self.is_over and not summary.is_over and summary.outcome != "failed"
        return "ended" if is_cut else summary.outcome

    def sentence(self, snapshot: Snapshot) -> str:
        """Return what came of a gang, and why if it failed, in one line."""
        summary = snapshot.summary
        if self.outcome(summary) != "ended":
            return summary.sentence
        # It stores its records every few seconds, so the last ones can be missing.
        last = f", of {_moment(snapshot.events[-1].time)}" if snapshot.events else ""
        which = "" if summary.is_alone else " of the control node (node 0)"
        unknown = f"The task{which} has ended, but has not recorded how."
        return f"{unknown} Its last record{last}: {summary.sentence}"


@dataclass(frozen=True)
class _Shown:
    """The data from which sections are made."""

    snapshot: Snapshot
    place: Place
    pages: Pages  # of features, by name
    is_short: bool  # whether the page has little space

    @property
    def summary(self) -> Summary:
        return self.snapshot.summary

    def cut(self, text: str) -> str:
        """Return a text, of a long one its begin where there is little space."""
        more = len(text) - _MAX_CHARS
        return f"{text[:_MAX_CHARS]}\n… {more} characters are left out here" if self.is_short and more > 0 else text


def _of_the_attempt(summary: Summary) -> str:
    """Return the name of the time that the attempt has taken."""
    if summary.trained_s is None:
        return "so far"
    return "with start" if summary.launch == 0 else "the whole step"


def section_names(pages: Pages) -> list[str]:
    """Return the names of all sections, in their order on the page."""
    found = list(_SECTIONS)
    for name, each in pages.items():
        if each.after in found:
            found.insert(found.index(each.after) + 1, name)
    return found


def page_of(snapshot: Snapshot, place: Place, pages: Pages = NO_PAGES, is_short: bool = False) -> Page:
    """Return the page of a gang; one that `is_short` leaves out what is more than a card should hold.

    `pages` has what features show, by name.
    """
    shown = _Shown(snapshot, place, pages, is_short)
    sections = [
        _section_of(name, shown) if name in pages else Section(name, *_SECTIONS[name](shown))
        for name in section_names(pages)
    ]
    return Page(place.title, tuple(sections))


def _section_of(name: str, shown: _Shown) -> Section:
    try:
        parts = tuple(shown.pages[name].parts(shown.snapshot.features.get(name), shown.summary))
    except Exception as error:  # what an older version has kept may not fit; the rest of the page does
        parts = (Sentence(f"This can't be shown: {type(error).__name__}: {error}"),)
    command = shown.pages[name].command
    if parts and command is not None and command.is_of_kept:
        parts = (*parts, Code(shown.place.command(command.name), "Command that shows more"))
    return Section(name, name.capitalize(), parts)


def _marks(shown: _Shown) -> dict[int, str]:
    """Return what features find odd about ranks."""
    found: dict[int, str] = {}
    for name, each in shown.pages.items():
        with suppress(Exception):  # the feature's own section says why
            found |= each.marks(shown.snapshot.features.get(name), shown.summary)
    return found


# --- the outcome ------------------------------------------------------------------------------------


def _outcome(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    snapshot, summary = shown.snapshot, shown.summary
    parts: list[Part] = [
        Sentence(shown.place.title + _as_of(snapshot), "headline"),
        Sentence(shown.place.sentence(snapshot), "outcome", summary.outcome),
    ]
    before = list(snapshot.reports)
    is_failure = snapshot.error is not None or summary.outcome == "failed"
    if is_failure and before and before[-1].error is not None:
        last = before.pop()
        text = _without_first(last.text, summary.sentence)
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


def _as_of(snapshot: Snapshot) -> str:
    if snapshot.began is None:
        return ""
    moment = time.gmtime(snapshot.began + snapshot.summary.seconds)
    return time.strftime(", as of %H:%M:%S UTC", moment)


def _former(shown: _Shown, report: Report) -> Block:
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
    summary = shown.summary
    nodes, ranks = {node.index: node for node in summary.nodes}, summary.ranks
    if not ranks:
        cells = (Cell(f"node {node.index}", "waiting", node.word, _host(node)) for node in summary.nodes)
        return "Ranks", (Sentence("No launch has begun, so there are no ranks."), Cells(tuple(cells)))
    tally = _tally(ranks)
    legend = Keys(tuple((text, state) for state, text in tally.items()), ", ".join(tally.values()))
    is_known = shown.place.outcome(summary) != "ended"
    head = (legend,) if is_known else (legend, Sentence("These are the last known states."))
    marks = _marks(shown)
    if len(ranks) <= _MAX_CELLS:
        cells = (_rank_cell(rank, _place(shown, nodes[rank.node]), nodes[rank.node], marks) for rank in ranks)
        return "Ranks", (*head, Cells(tuple(cells)))
    by_node = {node: of_node for node, of_node in summary.by_node.items() if of_node}
    cells = (_node_cell(_named(shown, node), nodes[node], of_node, marks) for node, of_node in by_node.items())
    return "Ranks", (*head, *_bad(shown), Cells(tuple(cells), is_small=len(by_node) > _MAX_CELLS))


def _host(node: Node) -> str:
    return node.host or "no host yet"


def _place(shown: _Shown, node: Node) -> str:
    return _host(node) if shown.summary.is_alone else f"node {node.index}, {_host(node)}"


def _rank_cell(rank: Rank, place: str, node: Node, marks: dict[int, str]) -> Cell:
    code = rank.exit_code
    end = "" if not code else f", exit code {code}" if code >= 0 else f", {signal_name(-code)}"
    if rank.state == "starting" and node.has_workers:
        end = ", no output yet"
    return Cell(f"rank {rank.rank}", rank.state, rank.state + end, place, marks.get(rank.rank, ""))


def _named(shown: _Shown, node: int) -> str:
    return "the node" if shown.summary.is_alone else f"node {node}"


def _node_cell(name: str, node: Node, ranks: list[Rank], marks: dict[int, str]) -> Cell:
    tally = _tally(ranks)
    mark = ", ".join(f"rank {rank.rank} {marks[rank.rank]}" for rank in ranks if rank.rank in marks)
    return Cell(name, next(iter(tally)), ", ".join(tally.values()), node.host, mark)


def _bad(shown: _Shown) -> list[Part]:
    """Name the ranks that failed or were lost, which a small cell only colours."""
    lines: list[Part] = []
    for state in ("failed", "lost"):
        found = [rank for rank in shown.summary.ranks if rank.state == state]
        if found:
            nodes = "" if shown.summary.is_alone else f" on {names(sorted({rank.node for rank in found}))}"
            lines.append(Sentence(f"{state}: {names((rank.rank for rank in found), 'rank')}{nodes}"))
    return lines


def _nodes(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    summary = shown.summary
    nodes, title = list(summary.nodes), "Nodes"
    if shown.is_short and len(nodes) > _MAX_NODES:
        title = "Node 0, and nodes that need a look"
        odd = {rank.node for rank in summary.ranks if rank.state in ("failed", "lost")}
        nodes = [node for node in nodes if node.index in {0, *odd} or node.state in ("not joined yet", "lost")][
            :_MAX_NODES
        ]
    header = ("node", "host", "task", "ranks", "state", "exit codes")
    if summary.is_alone:
        return "Node", (Table(header[1:], tuple(_node_row(shown, node)[1:] for node in nodes)),)
    rows = tuple(_node_row(shown, node) for node in nodes)
    what = "The gang is all nodes of one attempt of the step. Node 0 is the control node, which decides for all."
    return title, (Table(header, rows, right=("node",)), Sentence(what, "note"))


def _node_row(shown: _Shown, node: Node) -> tuple[str | Link, ...]:
    ranks = shown.summary.by_node[node.index]
    codes = [rank.exit_code for rank in ranks]
    has_ended = any(code is not None for code in codes) or (
        shown.summary.has_started and all(rank.state in _ENDED for rank in ranks)
    )
    is_range = len(ranks) > 1 and ranks[-1].rank - ranks[0].rank == len(ranks) - 1
    numbers = f"{ranks[0].rank}-{ranks[-1].rank}" if is_range else shortened(rank.rank for rank in ranks)
    ends = exit_codes(codes) if has_ended else ""
    return (str(node.index), node.host, _task(shown, node.index), numbers, node.word, ends)


def _task(shown: _Shown, node: int) -> str | Link:
    """Return the task of a node, as a link where Metaflow's UI is known."""
    place, tasks = shown.place, shown.snapshot.tasks or ()
    if node in place.tasks:
        found = f"{place.run}/{place.step}/{place.tasks[node]}"
    elif node < len(tasks):
        found = tasks[node]
    else:
        return "-"
    return Link(found.split("/")[-1], place.task(found).url)


def exit_codes(codes: Sequence[int | None]) -> str:
    """Return how the ranks of a node ended, in the order of ranks, or of many how many ended in which way."""
    words = ["unknown" if code is None else str(code) if code >= 0 else signal_name(-code) for code in codes]
    if len(words) <= _CODES:
        return " ".join(words)
    return ", ".join(f"{count} x {word}" for word, count in Counter(words).most_common())


# --- what happened when -----------------------------------------------------------------------------


def _timeline(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    together = {kind: text for each in shown.pages.values() for kind, text in each.together.items()}
    rows = timeline(shown.snapshot.events, together, shown.summary.is_alone)
    more = len(rows) - _FIRST_ROWS - _LAST_ROWS
    if shown.is_short and more > 0:
        rows = [*rows[:_FIRST_ROWS], ("", "", f"{more} lines are left out here"), *rows[-_LAST_ROWS:]]
    table = Table(("seconds", "launch", "what happened"), tuple(rows), right=("seconds",))
    return "Timeline", (Chart(_times(shown.summary)), table)


def _times(summary: Summary) -> dict[str, Any]:
    """Return the chart of all times: a line for each node, a colour for each state."""
    unit_s, _ = time_unit(summary.seconds)
    rows = [
        {
            "node": node.index,
            "host": node.host,
            "state": span.state,
            "from": round(span.begin_s / unit_s, 3),
            "to": round(span.end_s / unit_s, 3),
        }
        for node in summary.nodes
        for span in node.spans
        if span.state != "left" and span.end_s - span.begin_s >= summary.seconds * _NARROWEST
    ]
    states = [state for state in COLOURS if any(row["state"] == state for row in rows)]
    colours = {"domain": states, "range": [COLOURS[state] for state in states]}
    nodes = [node.index for node in summary.nodes]
    step = max(_MIN_STEP, min(_FULL_STEP, _HEIGHT // max(1, len(nodes))))
    labels = {"title": "node", "labelOverlap": True, "ticks": False, "domain": False}
    y_axis = None if summary.is_alone else labels
    told = ("host", "state", "from", "to") if summary.is_alone else ("node", "host", "state", "from", "to")
    legend = {"orient": "top", "title": None, "columns": 4}
    return {
        **frame(height={"step": step}),
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.8 if step > 8 else 1.0}},
        "encoding": {
            "y": {"field": "node", "type": "ordinal", "scale": {"domain": nodes, "padding": 0}, "axis": y_axis},
            "x": {"field": "from", **time_axis(summary.seconds, {"tickCount": 6})},
            "x2": {"field": "to"},
            "color": {"field": "state", "type": "nominal", "scale": colours, "legend": legend},
            "tooltip": [{"field": name} for name in told],
        },
    }


def _launch(shown: _Shown) -> tuple[str, tuple[Part, ...]]:
    snapshot, summary = shown.snapshot, shown.summary
    events, last = snapshot.events, ""
    # Without an accelerator it does not matter for which PyTorch was built.
    function = snapshot.facts.get("function", "")
    has_devices = snapshot.facts.get("devices") != "none"
    facts = {name: text for name, text in snapshot.facts.items() if has_devices or name not in _OF_DEVICES}
    if events and not summary.is_over:
        age = "" if snapshot.now_s is None else f", {duration(snapshot.now_s - events[-1].at_s)} ago"
        last = _moment(events[-1].time) + age
    rows = [
        ("started", "" if snapshot.began is None else _moment(snapshot.began)),
        ("trained", "" if summary.trained_s is None else duration(summary.trained_s)),
        (_of_the_attempt(summary), duration(summary.seconds)),
        ("last record", last),
        ("nodes", str(len(summary.nodes))),
        ("ranks on each", str(snapshot.nproc_per_node or "")),
        ("launch", "" if summary.launch is None else str(summary.launch)),
        ("restarts", _restarts(snapshot)),
        ("function", function),
        ("entrypoint and arguments", "" if function else (snapshot.command or "").partition(" -- ")[2]),
        *((title, facts.get(name, "")) for name, title in _FACTS.items()),
    ]
    # Of a function, the command names a script of ours and a folder that is gone.
    where = "Command" if summary.is_alone else "Command on node 0"
    command = [Code(snapshot.command, where)] if snapshot.command and not function else []
    return "Launch", (
        Facts(tuple(rows)),
        *command,
        Code(shown.place.commands(snapshot), "Commands that show more"),
    )


def _restarts(snapshot: Snapshot) -> str:
    """Return the number of restarts of all launches, and how many the last launch has left."""
    number = len(snapshot.summary.restarts_s)
    if snapshot.restarts_left is not None:
        return f"{number} ({snapshot.restarts_left} left in launch {snapshot.summary.launch})"
    # An older version's record has the text of the last one.
    said = [event.text for event in snapshot.events if event.kind == "restart"]
    return f"{number} (the last was {said[-1].partition(' in ')[0]})" if said else str(number)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# The core's sections in their order: what makes each, as a title and parts. One without a title stands by itself.
_SECTIONS: dict[str, Callable[[_Shown], tuple[str, tuple[Part, ...]]]] = {
    "outcome": _outcome,
    "ranks": _ranks,
    "timeline": _timeline,
    "nodes": _nodes,
    "launch": _launch,
}
