"""The gang in HTML: its outcome, why it failed, and a cell for each rank. Pure.

All of it is one line, since a blank line would end the block in Markdown; so line breaks of texts are entities.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..gang.cause import signal_name
from ..gang.history import Record
from ..gang.texts import names
from ..records.summary import Node, Rank, RankState, Summary

# More ranks become a cell for each node, and more nodes one without words of its own.
_MAX_CELLS = 64
# In which order states are told; the first that a node has gives its cell the colour.
_ORDER: tuple[RankState, ...] = (
    "failed",
    "lost",
    "stopping",
    "restarting",
    "starting",
    "waiting",
    "running",
    "stopped",
    "done",
)
# What the detail of a cause is, by its kind.
_DETAILS = {**dict.fromkeys(("exception", "step", "call"), "Traceback"), "hang": "Where the ranks were"}
_DETAILS["command"] = "Last lines of its output"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def one_line(text: str) -> str:
    """Return a text for HTML, whatever is in it, without a line break in the source."""
    safe = html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
    return safe.replace("\r", "&#13;").replace("\n", "&#10;")


def told(text: str) -> str:
    """Return a sentence by itself."""
    return f"<p>{one_line(text)}</p>"


def verdict(summary: Summary) -> str:
    """Return the outcome as a word and as a sentence."""
    word = one_line(summary.outcome)
    return (
        f'<div class="tr-verdict tr-{word}"><span class="tr-word">{word}</span>'
        f'<span class="tr-sentence">{one_line(summary.sentence)}</span></div>'
    )


def cause_block(record: Record | None, cause: dict[str, Any] | None, error: str | None = None) -> str:
    """Return who failed, where and how, with its traceback; without a cause the error, or why the gang restarted."""
    if cause is not None:
        return _framed("Cause", cause_facts(cause) + cause_detail(cause))
    if error:
        return _framed("Error", code_block(error, "Message"))
    return "" if record is None else _framed("Last restart because of", told(record.text))


def _framed(title: str, html: str) -> str:
    return f'<div class="tr-cause"><b>{one_line(title)}</b>{html}</div>'


def cause_facts(cause: dict[str, Any]) -> str:
    """Return where it failed, and how."""
    place = f"node {cause['node']} on host {cause['host']}"
    where = place if cause.get("rank") is None else f"rank {cause['rank']}, {place}"
    code = cause.get("exit_code")
    return facts(
        [
            ("where", "the launch as a whole" if cause.get("kind") in ("hang", "timeout") else where),
            ("what", cause.get("exception") or ""),
            ("exit code", "" if code is None else str(code)),
        ]
    )


def cause_detail(cause: dict[str, Any]) -> str:
    """Return its traceback, or what there is instead."""
    title = _DETAILS.get(cause.get("kind", ""), "Last lines of its stderr")
    return code_block(cause["detail"], title) if cause.get("detail") else ""


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values, without those that are empty."""
    listed = "".join(f"<div><dt>{one_line(name)}</dt><dd>{one_line(value)}</dd></div>" for name, value in rows if value)
    return f'<dl class="tr-facts">{listed}</dl>'


def code_block(text: str, title: str) -> str:
    """Return a text as it is, under a title."""
    return f'<div class="tr-label">{one_line(title)}</div><pre class="tr-code">{one_line(text)}</pre>'


def tally(ranks: Iterable[Rank]) -> str:
    """Return how many ranks are in which state, the worst first."""
    found = Counter(rank.state for rank in ranks)
    return ", ".join(f"{found[state]} {state}" for state in _ORDER if found[state])


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Return the ranks of each node."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return found


def rank_cells(summary: Summary) -> str:
    """Return a cell for each rank; of many one for each node."""
    if not summary.ranks:
        return told("No launch has begun yet, so there are no ranks.") + _grid(
            _waiting_cell(node) for node in summary.nodes
        )
    nodes = {node.index: node for node in summary.nodes}
    if len(summary.ranks) <= _MAX_CELLS:
        return _grid(_rank_cell(rank, nodes[rank.node]) for rank in summary.ranks)
    is_small = len(summary.nodes) > _MAX_CELLS
    cells = (_node_cell(nodes[node], ranks, is_small) for node, ranks in by_node(summary.ranks).items())
    grid = _grid(cells, "tr-small" if is_small else "")
    return _legend(summary.ranks) + _bad(summary) + grid


def _grid(cells: Iterable[str], name: str = "") -> str:
    return f'<ul class="tr-cells {name}">{"".join(cells)}</ul>'


def _cell(state: str, title: str, word: str, more: str) -> str:
    name = state.replace(" ", "-")
    return (
        f'<li class="tr-cell tr-{name}" title="{one_line(more)}"><b>{one_line(title)}</b>'
        f'<span class="tr-state">{one_line(word)}</span><small>{one_line(more)}</small></li>'
    )


def _rank_cell(rank: Rank, node: Node) -> str:
    place = f"node {node.index}, {node.host or 'no host yet'}"
    return _cell(rank.state, f"rank {rank.rank}", f"{rank.state}{_end(rank.exit_code)}", place)


def _end(exit_code: int | None) -> str:
    if exit_code is None:
        return ""
    return f", exit code {exit_code}" if exit_code >= 0 else f", {signal_name(-exit_code)}"


def _waiting_cell(node: Node) -> str:
    return _cell("waiting", f"node {node.index}", node.word, node.host or "no host yet")


def _worst(ranks: list[Rank]) -> RankState:
    return min((rank.state for rank in ranks), key=_ORDER.index)


def _node_cell(node: Node, ranks: list[Rank], is_small: bool) -> str:
    state, more = _worst(ranks), f"node {node.index}, {node.host}: {tally(ranks)}"
    if is_small:
        return f'<li class="tr-cell tr-{state}" title="{one_line(more)}">{node.index}</li>'
    return _cell(state, f"node {node.index}", tally(ranks), node.host)


def _legend(ranks: Iterable[Rank]) -> str:
    """Return each state's colour, with how many ranks are in it."""
    found = Counter(rank.state for rank in ranks)
    return "".join(f'<span class="tr-key tr-{state}">{found[state]} {state}</span>' for state in _ORDER if found[state])


def _bad(summary: Summary) -> str:
    """Name the ranks that failed or were lost, which a small cell only colours."""
    lines = []
    for state in ("failed", "lost"):
        ranks = [rank for rank in summary.ranks if rank.state == state]
        if ranks:
            nodes = sorted({rank.node for rank in ranks})
            lines.append(told(f"{state}: {names((rank.rank for rank in ranks), 'rank')} on {names(nodes)}"))
    return "".join(lines)
