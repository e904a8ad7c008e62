"""What stands on the gang's page, top to bottom, as components of Metaflow's cards (plain data). Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from ..gang.texts import duration
from ..gang.wire import finite
from ..records.summary import Summary, from_stored
from . import progress
from .drawing import by_node, cause_block, code_block, facts, one_line, rank_cells, tally, told, verdict
from .restarts import restarts_block
from .style import PARTS_STYLE
from .timeline import chart
from .usage import usage_parts

# Of more nodes, those are listed that need a look.
_MAX_LISTED = 64
_FACTS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "python": "Python", "devices": "devices"}


Component: TypeAlias = dict[str, Any]
Content: TypeAlias = dict[str, Any]


def layout(content: Content, gangs: Iterable[str] = ()) -> Component:
    """Return the whole page; `content` is what ``records/event_store`` keeps, with the task's name.

    `gangs` are the steps of the flow that are gangs, where that is known.
    """
    step = content["task"].split("/")[2]
    if "events" not in content and gangs and step not in gangs:
        content = {**content, "said": _elsewhere(content["task"], list(gangs))}
    return {"type": "page", "title": "Gang", "contents": sections(content)}


def _elsewhere(task: str, gangs: list[str]) -> str:
    """Say where the gangs are, on the page of another step."""
    flow, run, step, _ = task.split("/")
    places = ", ".join(f"{flow}/{run}/{each}" for each in gangs)
    where = f"The gang of this run is that of {places}." if len(gangs) == 1 else f"The gangs of this run are: {places}."
    return f"Step {step} is no gang: it has no @torchrun, or is not entered with num_parallel. {where}"


def sections(content: Content, names: Iterable[str] = ()) -> list[Component]:
    """Return the sections of the page with these names, in the order of `SECTIONS`; all of them by default."""
    if "events" not in content:
        return [_markdown("gang-none", _without_records(content))]
    summary, wanted = from_stored(content, content.get("now_s")), tuple(names) or tuple(SECTIONS)
    found: list[Component] = []
    for name in (name for name in SECTIONS if name in wanted):
        title, contents = SECTIONS[name](summary, content)
        found += [_section(title, contents)] if title and contents else contents
    plain: list[Component] = finite(found)
    return plain


def parts(content: Content) -> list[Component]:
    """Return what can change while the gang runs, each with an id."""
    if "events" not in content:
        return []
    found = sections(content)
    return [part for each in found for part in ([each] if "id" in each else each["contents"])]


def part(name: str, content: Content, names: Iterable[str]) -> Component:
    """Return sections as one component with this id, for a card of a user's own; it brings the style."""
    style = {"type": "markdown", "source": f"<style>{PARTS_STYLE}</style>"}
    return {"type": "section", "id": name, "contents": [style, *sections(content, names)]}


def _outcome(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    # By themselves: what does not change stays unfolded while the page is renewed.
    restarts = _markdown("gang-restarts", restarts_block(content.get("reports", ())))
    return "", [_markdown("gang-outcome", verdict(summary) + _whose(content) + _why(summary, content)), restarts]


def _ranks(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    return "Ranks", [_markdown("gang-ranks", rank_cells(summary))]


def _progress(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    # Always there, so that what scripts tell later has a place on the page.
    contents = _contents_of_progress(summary, content.get("progress"))
    return "", [
        {"type": "section", "id": "gang-progress", "contents": contents, **({"title": "Progress"} if contents else {})}
    ]


def _contents_of_progress(summary: Summary, known: dict[str, Any] | None) -> list[Component]:
    if not known:
        return []
    # A node that is not the control node knows its own ranks alone.
    return [progress.of_ranks(known["paces"])] if "paces" in known else progress.components(summary, known)


def _timeline(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    return "Timeline", [chart("gang-times", summary)]


def _nodes(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    few = "Node" if "node" in content else "Nodes"
    title = few if len(summary.nodes) <= _MAX_LISTED else "Node 0, and nodes that need a look"
    return title, [_nodes_table(summary, content)]


def _usage(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    usage = content.get("usage")  # what is stored of an old run has none
    return "Usage", usage_parts(usage) if usage else []


def _launch(summary: Summary, content: Content) -> tuple[str, list[Component]]:
    return "Launch", [_markdown("gang-facts", _facts(summary, content))]


# The page from top to bottom: what makes a section of what is known, as a title and components, each with an id. A
# section without a title stands by itself. A user names them for a card of their own.
SECTIONS: dict[str, Callable[[Summary, Content], tuple[str, list[Component]]]] = {
    "outcome": _outcome,
    "progress": _progress,
    "ranks": _ranks,
    "timeline": _timeline,
    "usage": _usage,
    "nodes": _nodes,
    "launch": _launch,
}


def _why(summary: Summary, content: Content) -> str:
    # Records that are older than the reports tell of a restart in one line.
    last = None if content.get("reports") else summary.cause
    return cause_block(last, content.get("cause"), content.get("error"))


def _section(title: str, contents: list[Component]) -> Component:
    return {"type": "section", "title": title, "contents": contents}


def _markdown(name: str, html: str) -> Component:
    """Return HTML as a component: Metaflow's has none of its own for it, but its Markdown lets a block through."""
    return {"type": "markdown", "id": name, "source": f'<div class="tr">{html}</div>'}


def _without_records(content: Content) -> str:
    none = "There are no records of a gang with this task."
    why = "Its step has no @torchrun, or another task is the control node, or the run is older than such records."
    return told(content.get("said", f"{none} {why}"))


def _whose(content: Content) -> str:
    """Say where the gang's card is, on that of one node."""
    if "control" not in content:
        return ""
    control = _pathspec(content["control"], content)
    place, url = one_line(control), _url(control, content)
    link = f'<a href="{one_line(url)}">{place}</a>' if url else place
    said = f"This is node {content['node']}. The gang's card is that of the control task, {link}."
    return f'<p class="tr-whose">{said}</p>'


def _nodes_table(summary: Summary, content: Content) -> Component:
    wanted = [node.index for node in summary.nodes]
    if len(wanted) > _MAX_LISTED:
        odd = {rank.node for rank in summary.ranks if rank.state in ("failed", "lost")}
        odd |= {node.index for node in summary.nodes if node.state in ("missing", "lost")}
        wanted = sorted({0, *odd})[:_MAX_LISTED]
    ranks = by_node(summary.ranks)
    rows = [
        [
            str(node.index),
            node.host or "–",
            node.word,
            tally(ranks.get(node.index, [])) or "–",
            _task(node.index, content),
        ]
        for node in summary.nodes
        if node.index in wanted
    ]
    return {
        "type": "table",
        "id": "gang-nodes",
        "columns": ["node", "host", "state", "ranks", "task"],
        "data": rows,
        "vertical": False,
    }


def _task(node: int, content: Content) -> Any:
    """Return the pathspec of a node's task, as a link where Metaflow's UI is known."""
    tasks = content.get("tasks") or []
    if "node" in content:
        pathspec = content["task"]
    elif node < len(tasks):
        pathspec = _pathspec(tasks[node], content)
    else:
        return "–"
    url = _url(pathspec, content)
    return {"type": "markdown", "source": f"[{pathspec}]({url})"} if url else pathspec


def _pathspec(task: str, content: Content) -> str:
    """Return the pathspec of a task of this flow that is given as run, step and task."""
    return f"{content['task'].split('/')[0]}/{task}"


def _url(pathspec: str, content: Content) -> str | None:
    url = content.get("ui_url")
    return f"{url.rstrip('/')}/{pathspec}" if url else None


def _facts(summary: Summary, content: Content) -> str:
    began = content["events"][0]["time"] - content["events"][0]["at_s"] if content["events"] else None
    known = content.get("facts") or {}
    rows = [
        ("began", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)) if began is not None else "–"),
        ("so far" if not summary.is_over else "took", duration(summary.seconds)),
        ("nodes", str(content.get("of_nodes", len(summary.nodes)))),
        ("ranks on each", str(content["nproc_per_node"] or "–")),
        ("launch", "–" if summary.launch is None else str(summary.launch)),
        ("restarts", str(summary.restarts)),
        ("left out", next((event["text"] for event in content["events"] if event["kind"] == "omitted"), "")),
        *((name, known[key]) for key, name in _FACTS.items() if key in known),
    ]
    command = content.get("command")
    return facts(rows) + (code_block(command, f"Command on node {content.get('node', 0)}") if command else "")
