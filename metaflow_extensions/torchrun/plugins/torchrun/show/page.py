"""The page of a gang, made from its view; the same page for a terminal and for a card. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..gang.cause import signal_name
from ..gang.goodput import said as goodput_said
from ..gang.view import FailureReport, GangView
from ..machine.frames import begin_of
from ..texts import duration, moment, names, shortened
from . import reported
from .charts import chart_of_times
from .parts import Block, Cell, Cells, Code, Facts, Keys, Page, Part, Section, Sentence, Table, WebLink
from .words import Rank, outcome_of, ranks_of, ranks_on, sentence, timeline, trained_s

# More ranks become a cell for each node, and more nodes one without words of its own.
_MAX_CELLS = 64
# A page that has little space lists so many nodes, those that need a look, and so many rows of what happened.
_MAX_NODES, _FIRST_ROWS, _LAST_ROWS = 64, 20, 80
_MAX_REPORTS, _MAX_CHARS = 5, 32_000  # of former failures, and characters of each report
_CODES = 4  # so many exit codes of a node are shown one by one
# In which order states are told; the first that a node has gives its cell the colour.
_ORDER = (
    "failed", "lost", "stopping", "restarting", "starting", "waiting", "running", "stopped", "done",
)  # fmt: skip
_FACTS = {"torch": "PyTorch", "python": "Python", "devices": "devices"}


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
    def where(self) -> str:
        """Name the gang as our commands do."""
        return f"{self.run}/{self.step}/{self.control_task}"

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

    def outcome(self, view: GangView) -> str:
        """Return ``done`` or ``failed``, the same as the view while the gang runs, or ``ended`` if none knows how."""
        is_cut = self.is_over and not view.is_over and view.outcome != "failed"
        return "ended" if is_cut else outcome_of(view)

    def sentence(self, view: GangView) -> str:
        """Return what came of a gang, and why if it failed, in one line."""
        unknown = ""
        # It is stored every few seconds, so the last of it can be missing.
        if self.outcome(view) == "ended":
            unknown = "The task of the control node (node 0) has ended, but has not recorded how."
        elif view.is_silent:  # as when Metaflow kills the tasks of an interrupted run
            unknown = "Nothing is heard of this gang any more: its run may have been killed."
        if not unknown:
            return sentence(view)
        return f"{unknown} The last that is known, of {moment(view.began + view.now_s)}: {sentence(view)}"


@dataclass(frozen=True)
class _Shown:
    """The data from which sections are made."""

    view: GangView
    place: Place
    is_short: bool  # whether the page has little space
    ranks: list[Rank]

    def code(self, text: str) -> list[Code]:
        """Return a text, if there is one; of a long one its begin where there is little space."""
        return [Code(begin_of(text, _MAX_CHARS) if self.is_short else text)] if text else []


def page_of(view: GangView, place: Place, is_short: bool = False) -> Page:
    """Return the page of a gang; one that `is_short` leaves out what is more than a card should hold."""
    shown = _Shown(view, place, is_short, ranks_of(view))
    return Page(place.title, [Section(name, title, make(shown)) for name, (title, make) in _SECTIONS.items()])


# --- the outcome ------------------------------------------------------------------------------------


def _outcome(shown: _Shown) -> list[Part]:
    view, said = shown.view, shown.place.sentence(shown.view)
    as_of = f", as of {moment(view.began + view.seconds)}" if view.began else ""
    parts: list[Part] = [
        Sentence(shown.place.title + as_of, "headline"),
        Sentence(said, "outcome", outcome_of(view)),
    ]
    before = list(view.reports)
    is_failure = view.error is not None or view.outcome == "failed"
    if is_failure and before and before[-1].error is not None:
        parts += _failure(shown, before.pop(), said)
    most = _MAX_REPORTS if shown.is_short else len(before)
    for report in before[::-1][:most]:  # failures that were not the end of it
        what, _, text = report.text.partition("\n")
        after = [Sentence("All workers start again after this.")] if report.error is None else []
        contents = [*after, *shown.code(text)]
        parts.append(Block(f"After {duration(report.at_s)}: {what}", contents, is_folded=True))
    if len(before) > most:
        parts.append(Sentence(f"{len(before) - most} earlier failures are not shown here."))
    return parts


def _failure(shown: _Shown, report: FailureReport, said: str) -> list[Part]:
    """Return the failure that was the end, without a first line that the sentence above it has said."""
    first, _, rest = report.text.partition("\n")
    code = shown.code(rest if first[1:].rstrip(".") in said else report.text)
    cause = report.cause or {}
    blocks: list[Part] = [Block("Cause" if cause else "Error", code)] if code else []
    if cause.get("stdout"):
        blocks.append(Block(f"Last lines of rank {cause['rank']}'s stdout", [Code(cause["stdout"])]))
    return blocks


# --- ranks and nodes --------------------------------------------------------------------------------


def _tally(ranks: Iterable[Rank]) -> dict[str, str]:
    """Return how many ranks are in which state, the worst first."""
    found = Counter(rank.state for rank in ranks)
    return {state: f"{found[state]} {state}" for state in _ORDER if found[state]}


def _ranks(shown: _Shown) -> list[Part]:
    view, ranks = shown.view, shown.ranks
    if not ranks:
        cells = [
            Cell(f"node {i}", "waiting", node.state, node.host or "no host yet") for i, node in enumerate(view.nodes)
        ]
        return [Sentence("No launch has begun, so there are no ranks."), Cells(cells)]
    parts: list[Part] = [Keys(_tally(ranks))]
    if shown.place.outcome(view) == "ended":
        parts.append(Sentence("These are the last known states."))
    if len(ranks) <= _MAX_CELLS:
        return [*parts, Cells([_rank_cell(view, rank) for rank in ranks])]
    by_node: dict[int, list[Rank]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    for state in ("failed", "lost"):  # which a small cell only colours
        if bad := [rank for rank in ranks if rank.state == state]:
            nodes = names(sorted({rank.node for rank in bad}))
            parts.append(Sentence(f"{state}: {names((rank.rank for rank in bad), 'rank')} on {nodes}"))
    cells = []
    for node, its in by_node.items():
        tally = _tally(its)
        cells.append(Cell(f"node {node}", next(iter(tally)), ", ".join(tally.values()), view.nodes[node].host))
    return [*parts, Cells(cells, is_small=len(by_node) > _MAX_CELLS)]


def _rank_cell(view: GangView, rank: Rank) -> Cell:
    code, node = rank.exit_code, view.nodes[rank.node]
    end = "" if not code else f", exit code {code}" if code >= 0 else f", {signal_name(-code)}"
    if rank.state == "running" and not node.has_written:
        end = ", no output yet"
    place = f"node {rank.node}, {node.host or 'no host yet'}"
    return Cell(f"rank {rank.rank}", rank.state, rank.state + end, place)


def _nodes(shown: _Shown) -> list[Part]:
    view, nodes = shown.view, list(range(len(shown.view.nodes)))
    parts: list[Part] = []
    if shown.is_short and len(nodes) > _MAX_NODES:
        odd = {rank.node for rank in shown.ranks if rank.state in ("failed", "lost")}
        odd |= {node for node in nodes if node == 0 or view.nodes[node].state in ("not joined yet", "lost")}
        nodes = sorted(odd)[:_MAX_NODES]
        parts.append(Sentence("These are node 0, and nodes that need a look."))
    rows = [_node_row(shown, node) for node in nodes]
    what = "The gang is all nodes of one attempt of the step. Node 0 is the control node, which decides for all."
    header = ("node", "host", "task", "ranks", "state", "exit codes")
    return [*parts, Table(header, rows, right=("node",)), Sentence(what, "note")]


def _node_row(shown: _Shown, index: int) -> tuple[str | WebLink, ...]:
    view, node, place = shown.view, shown.view.nodes[index], shown.place
    ranks = ranks_on(view, index)
    numbers = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else shortened(ranks)
    codes = [node.exit_codes.get(rank) for rank in ranks if node.exit_codes]
    words = ["unknown" if code is None else str(code) if code >= 0 else signal_name(-code) for code in codes]
    ends = " ".join(words)
    if len(words) > _CODES:
        ends = ", ".join(f"{count} x {word}" for word, count in Counter(words).most_common())
    pathspec = f"{place.run}/{place.step}/{place.tasks[index]}" if index in place.tasks else node.task
    url = f"{place.ui_url.rstrip('/')}/{place.flow}/{pathspec}" if place.ui_url else None
    task = "-" if pathspec is None else WebLink(pathspec.split("/")[-1], url)
    return (str(index), node.host, task, numbers, node.state, ends)


# --- what happened when -----------------------------------------------------------------------------


def _timeline(shown: _Shown) -> list[Part]:
    rows = timeline(shown.view)
    more = len(rows) - _FIRST_ROWS - _LAST_ROWS
    if shown.is_short and more > 0:
        rows = [*rows[:_FIRST_ROWS], ("", "", f"{more} lines are left out here"), *rows[-_LAST_ROWS:]]
    return [chart_of_times(shown.view), Table(("seconds", "launch", "what happened"), rows, right=("seconds",))]


def _launch(shown: _Shown) -> list[Part]:
    view = shown.view
    function = view.facts.get("function", "")
    facts = {name: text for name, text in view.facts.items() if text != "none"}
    trained = trained_s(view)
    whole = "so far" if trained is None else "with start" if view.launch == 0 else "the whole step"
    left = "" if view.restarts_left is None else f" ({view.restarts_left} left in launch {view.launch})"
    rows = [
        ("started", moment(view.began) if view.began else ""),
        ("trained", "" if trained is None else duration(trained)),
        (whole, duration(view.seconds)),
        ("goodput", goodput_said(view.goodput.until(view.seconds)) if view.launch is not None else ""),
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
    return [Facts(rows), *command, Code(shown.place.commands(view), "Commands that show more")]


def _outputs(shown: _Shown) -> list[Part]:
    command = Code(shown.place.command("outputs"), "Command that shows more")
    return [*reported.outputs(shown.view), command] if shown.view.outputs else []


# All sections in their order: title, and what makes the parts. One without a title stands by itself.
_SECTIONS: dict[str, tuple[str, Callable[[_Shown], list[Part]]]] = {
    "outcome": ("", _outcome),
    "hangs": ("Hangs", lambda shown: reported.hangs(shown.view)),
    "progress": ("Progress", lambda shown: reported.progress(shown.view)),
    "ranks": ("Ranks", _ranks),
    "timeline": ("Timeline", _timeline),
    "usage": ("Usage", lambda shown: reported.usage(shown.view)),
    "nodes": ("Nodes", _nodes),
    "outputs": ("Outputs", _outputs),
    "launch": ("Launch", _launch),
}
SECTION_NAMES = tuple(_SECTIONS)
