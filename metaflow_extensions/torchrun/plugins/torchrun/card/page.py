"""What stands on the gang's page, top to bottom, as components of Metaflow's cards (plain data). Pure."""

from __future__ import annotations

import time
from typing import Any

from ..gang.summary import Summary, from_stored
from ..gang.texts import duration
from .drawing import by_node, cause_block, code_block, facts, rank_cells, tally, told, verdict
from .timeline import chart

# Of more nodes, those are listed that need a look.
_MAX_LISTED = 64
_FACTS = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "python": "Python", "devices": "devices"}


def layout(content: dict[str, Any]) -> dict[str, Any]:
    """Return the whole page; `content` is what ``border/event_store`` keeps, with the task's name."""
    if "events" not in content:
        return _page([_markdown("gang-none", _without_records(content))])
    outcome, ranks, times, nodes, facts = parts(content)
    return _page(
        [
            outcome,
            _section("Ranks", ranks),
            _section("Timeline", times),
            _section("Nodes" if content["num_nodes"] <= _MAX_LISTED else "Node 0, and nodes that need a look", nodes),
            _section("Launch", facts),
        ]
    )


def parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what can change while the gang runs, each with an id."""
    if "events" not in content:
        return []
    summary = from_stored(content, content.get("now_s"))
    return [
        _markdown("gang-outcome", verdict(summary) + _why(summary, content)),
        _markdown("gang-ranks", rank_cells(summary)),
        chart("gang-times", summary),
        _nodes_table(summary, content),
        _markdown("gang-facts", _facts(summary, content)),
    ]


def _why(summary: Summary, content: dict[str, Any]) -> str:
    return cause_block(summary.cause, content.get("cause"), content.get("error"))


def _page(contents: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "page", "title": "Gang", "contents": contents}


def _section(title: str, *contents: dict[str, Any]) -> dict[str, Any]:
    return {"type": "section", "title": title, "contents": list(contents)}


def _markdown(name: str, html: str) -> dict[str, Any]:
    """Return HTML as a component: Metaflow's has none of its own for it, but its Markdown lets a block through."""
    return {"type": "markdown", "id": name, "source": f'<div class="tr">{html}</div>'}


def _without_records(content: dict[str, Any]) -> str:
    control = content.get("control")
    if control is not None:
        flow = content["task"].split("/")[0]
        return told(f"This is node {content['node']}. The gang's card is that of the control task, {flow}/{control}.")
    return told(
        "There are no records of a gang with this task: it is no control node's, or the run is older than they."
    )


def _nodes_table(summary: Summary, content: dict[str, Any]) -> dict[str, Any]:
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
            node.state,
            tally(ranks.get(node.index, [])) or "–",
            _task(node.index, content),
        ]
        for node in (summary.nodes[index] for index in wanted)
    ]
    return {
        "type": "table",
        "id": "gang-nodes",
        "columns": ["node", "host", "state", "ranks", "task"],
        "data": rows,
        "vertical": False,
    }


def _task(node: int, content: dict[str, Any]) -> Any:
    """Return the pathspec of a node's task, as a link where Metaflow's UI is known."""
    tasks = content.get("tasks") or []
    if node >= len(tasks):
        return "–"
    pathspec = f"{content['task'].split('/')[0]}/{tasks[node]}"
    url = content.get("ui_url")
    return {"type": "markdown", "source": f"[{pathspec}]({url.rstrip('/')}/{pathspec})"} if url else pathspec


def _facts(summary: Summary, content: dict[str, Any]) -> str:
    began = content["events"][0]["time"] - content["events"][0]["at_s"] if content["events"] else None
    known = content.get("facts") or {}
    rows = [
        ("began", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)) if began is not None else "–"),
        ("so far" if not summary.is_over else "took", duration(summary.seconds)),
        ("nodes", str(len(summary.nodes))),
        ("ranks on each", str(content["nproc_per_node"] or "–")),
        ("launch", "–" if summary.launch is None else str(summary.launch)),
        ("restarts", str(summary.restarts)),
        *((name, known[key]) for key, name in _FACTS.items() if key in known),
    ]
    command = content.get("command")
    return facts(rows) + (code_block(command, "Command on node 0") if command else "")
