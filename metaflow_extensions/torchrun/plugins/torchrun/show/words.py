"""What a gang's view says, in words: the outcome in one sentence, and the state of each rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..gang.view import GangView, Outcome, State
from ..texts import counted, duration, names

_STOPPED_BY = (-15, -9)  # exit codes of a worker that the gang has stopped: SIGTERM, or SIGKILL if it did not end
# Of a node whose ranks have not ended, these states are theirs, too.
_OF_RANKS = {"not joined yet": "waiting", "preparing": "waiting"} | {
    state: state for state in ("waiting", "starting", "running", "stopping", "restarting", "lost")
}


@dataclass(frozen=True)
class Rank:
    """One rank of the last launch, in its last generation."""

    rank: int
    node: int
    state: str  # as of a node, or done or failed
    exit_code: int | None = None  # None: unknown, or the rank has not ended


def ranks_of(view: GangView) -> list[Rank]:
    """Return all ranks in order; none before the first launch."""
    return [
        Rank(rank, node, _state(view, node, rank), view.nodes[node].exit_codes.get(rank))
        for node in taking_part(view)
        for rank in ranks_on(view, node)
    ]


def taking_part(view: GangView) -> list[int]:
    """Return the nodes of the last generation, in the order of their ranks; before it, those that may take part."""
    return [index for index, node in enumerate(view.nodes) if node.takes_part]


def ranks_on(view: GangView, node: int) -> range:
    """Return the ranks of a node; none if it takes no part, or before the first launch."""
    if view.nproc is None or not view.nodes[node].takes_part:
        return range(0)
    first = taking_part(view).index(node) * view.nproc
    return range(first, first + view.nproc)


def trained_s(view: GangView) -> float | None:
    """Return how long the last launch has taken from its start to its end, or until now; None before it."""
    if view.began_s is None:
        return None
    return (view.since_s if view.outcome in ("done", "failed") else view.seconds) - view.began_s


def _state(view: GangView, node: int, rank: int) -> str:
    code = view.nodes[node].exit_codes.get(rank)
    is_cause = view.cause is not None and view.outcome == "failed" and view.cause.get("rank") == rank
    if is_cause and code != 0:
        return "failed"
    if code is None:
        return _OF_RANKS.get(view.nodes[node].state, "waiting" if view.began_s is None else "stopped")
    return "done" if code == 0 else "stopped" if code in _STOPPED_BY else "failed"


def outcome_of(view: GangView) -> Outcome:
    """Return the outcome of the step: it has ended well, though a launch may have failed, or none was called."""
    is_well = view.ended_s is not None and view.outcome in ("failed", "waiting")
    return "done" if is_well and view.nodes[0].state in ("storing", "finished") else view.outcome


def sentence(view: GangView) -> str:
    """Return the outcome in one sentence."""
    count = len(taking_part(view))
    ranks = "The workers" if view.nproc is None else counted(view.nproc * count, "rank")
    workers = ranks if len(view.nodes) == 1 else f"{ranks} on {counted(count, 'node')}"
    is_one, is_own = ranks == "1 rank", " The step's own code runs." * (view.ended_s is None and not view.is_over)
    after = f", after {counted(view.generation, 'restart')}" if view.generation else ""
    took, outcome = _took(view), outcome_of(view)
    match view.outcome:
        case "waiting" if outcome == "done":
            return "The step has ended well; it has launched nothing."
        case "waiting":
            return _waiting(view)
        case "starting":
            return f"{workers} {'is' if is_one else 'are'} starting, for {duration(view.now_s - view.since_s)}{after}."
        case "running":
            return f"{workers} {'has' if is_one else 'have'} {took}{after}."
        case "stopping":
            return _ended("All nodes are told to stop", view.why)
        case "restarting":
            waits = f", which wait for {view.waits_for}" if view.waits_for else ""
            return _ended(f"All workers start again{waits}", view.why)
        case "done":
            ended = ", ".join(filter(None, (f"{workers} {'has' if is_one else 'have'} ended well", view.why)))
            return f"{ended}{after}: {took}.{is_own}"
    if outcome == "done":
        return _ended(f"The step has ended well, though launch {view.launch} had failed", view.why)
    when = f"after {duration(view.since_s)}" if view.began_s is None else f"({took})"
    return _ended(f"Failed {when}{after}", view.why)


def _took(view: GangView) -> str:
    """Return the durations that a page tells: of the last launch, and with the start, where that was for it alone."""
    trained = f"trained {duration(trained_s(view) or 0.0)}"
    is_last = view.launch == 0 and (view.outcome == "running" or view.is_over or view.ended_s is not None)
    return f"{trained}, with start {duration(view.seconds)}" if is_last else trained


def _waiting(view: GangView) -> str:
    def which(*states: State) -> list[int]:
        return [index for index, node in enumerate(view.nodes) if node.state in states]

    count, missing, called, late = len(view.nodes), which("not joined yet"), which("waiting"), which("step code")
    if prepare := which("preparing"):
        return f"The commands of before_run run on {names(prepare)}."
    if missing:
        return f"{count - len(missing)} of {count} nodes have joined; not joined yet: {names(missing)}."
    if called and late:
        return f"{len(called)} of {count} nodes have called run; still in the step's code: {names(late)}."
    return f"{counted(count, 'node')} joined; the step's code runs."


def _ended(what: str, why: str) -> str:
    text = f"{what}: {why}" if why else what
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."


def timeline(view: GangView) -> list[tuple[str, str, str]]:
    """Return what happened as rows, in the order of time: seconds, launch, and words."""
    rows = []
    # A cause becomes known after what follows from it.
    for event in sorted(view.events, key=lambda each: (each.at_s, each.kind != "cause")):
        of_nodes = event.nodes if len(view.nodes) > 1 else []  # a single node needs no name
        numbers, what = (event.ranks, "rank") if event.ranks else (of_nodes, "node")
        text = event.text.replace("was ", "were ", 1) if len(numbers) > 1 else event.text
        if numbers and event.kind != "cause":  # which names its rank itself
            text = f"{names(sorted(set(numbers)), what)}: {text}"
        if event.seconds is not None:
            text += f", {event.seconds:.1f} s"
        first, last = f"{event.at_s:.1f}", f"{event.until_s or event.at_s:.1f}"
        generation = f".{event.generation}" if event.generation else ""
        launch = "" if event.launch is None else f"{event.launch}{generation}"
        rows.append((first if first == last else f"{first}-{last}", launch, text))
    if view.left_out:
        rows.insert(0, ("", "", f"{view.left_out} lines are left out here"))
    return rows
