"""What is shown of one gang, as text and as plain data? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..gang.cause import signal_name
from ..gang.texts import counted, duration, shortened
from . import progress
from .story import Story
from .table import printable, table
from .timeline import timeline

_CODES = 4  # so many exit codes of a node are shown one by one


@dataclass(frozen=True)
class Facts:
    """What Metaflow has of one attempt of one gang."""

    run: str
    step: str
    control_task: str
    tasks: Mapping[int, str]  # by node
    attempt: int
    last_attempt: int
    is_done: bool  # whether Metaflow knows of the attempt's end
    clone: tuple[str, str] | None = None  # run and control task of the clone of it that was asked for

    @property
    def is_over(self) -> bool:
        """Whether the control node's task has ended."""
        return self.is_done or self.attempt < self.last_attempt


def as_data(facts: Facts, content: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
    """Return all that is known, for ``--json``."""
    story = _story(facts, content or {}, now)
    return {
        "run": facts.run,
        "clone": None if facts.clone is None else {"run": facts.clone[0], "control_task": facts.clone[1]},
        "control_task": facts.control_task,
        "attempt": facts.attempt,
        "last_attempt": facts.last_attempt,
        "outcome": None if content is None else outcome(facts, story),
        "sentence": None if content is None else story.summary.sentence,
        "began": story.began,
        "seconds": None if content is None else round(story.summary.seconds, 3),
        "restarts": story.restarts,
        "nproc_per_node": story.nproc,
        "facts": (content or {}).get("facts") or {},
        "command": (content or {}).get("command"),
        "progress": (content or {}).get("progress"),
        "nodes": [_node_data(facts, story, node) for node in sorted({*facts.tasks, *story.nodes})],
        "reports": story.reports,
        "events": [record.as_dict() for record in story.records],
        "usage": (content or {}).get("usage"),
        "outputs": (content or {}).get("outputs"),
    }


def _node_data(facts: Facts, story: Story, number: int) -> dict[str, Any]:
    is_known = number in story.nodes
    return {
        "node": number,
        "host": story.nodes[number].host or None if is_known else None,
        "task": facts.tasks.get(number),
        "ranks": story.ranks_of(number) if is_known else [],
        "state": story.state_of(number) if is_known else None,
        "seconds": story.seconds_of(number) if is_known else None,
        "exit_codes": {str(rank): code for rank, code in story.exit_codes.get(number, {}).items()},
    }


def _story(facts: Facts, content: Mapping[str, Any], now: float) -> Story:
    """Return the story until now, if the gang may still run."""
    story = Story(content)
    if story.began is None or story.summary.is_over or facts.is_over:
        return story
    return Story(content, now - story.began)


def outcome(facts: Facts, story: Story) -> str:
    """Return ``done`` or ``failed``, the same as the summary while the gang runs, or ``ended`` if none knows how."""
    cut = facts.is_over and not story.summary.is_over and story.summary.outcome != "failed"
    return "ended" if cut else story.summary.outcome


def is_cut(facts: Facts, content: Mapping[str, Any]) -> bool:
    """Tell whether the control node's task has ended without a word of how."""
    return outcome(facts, Story(content)) == "ended"


def headline(facts: Facts, content: Mapping[str, Any], now: float) -> str:
    """Return what came of a gang, and why if it failed, in one line."""
    story = _story(facts, content, now)
    return _if_cut(facts, story, printable(story.summary.sentence))


def _if_cut(facts: Facts, story: Story, sentence: str) -> str:
    if outcome(facts, story) != "ended":
        return sentence
    # It records every few seconds, so the last of what has happened can be missing.
    last = datetime.fromtimestamp(story.records[-1].time).astimezone().strftime("%H:%M:%S") if story.records else ""
    unknown = "The control node's task has ended, but has not recorded how."
    return f"{unknown} Its last record{last and f', of {last}'}: {sentence}"


def as_text(facts: Facts, content: Mapping[str, Any], now: float) -> list[str]:
    """Return the page of a gang: what came of it, why if it failed, its nodes, and what happened when."""
    story = _story(facts, content, now)
    reports = [printable(str(each["text"])).splitlines() for each in story.reports]
    is_failed = story.summary.outcome == "failed" and bool(reports)
    first = _if_cut(facts, story, printable(_sentence(story, is_failed)))
    lines = [title(facts), first, _facts(story, now)]
    lines += _progress(story, content.get("progress"))
    if is_failed:
        lines += ["", *reports.pop()]
    lines += ["", *_nodes(facts, story), "", *_events(story)]
    for report, text in zip(story.reports, reports, strict=False):
        lines += ["", f"At {report['at_s']:.1f} s: {_is_handled(report)}", *text]
    return lines


def failed_rank(content: Mapping[str, Any]) -> int | None:
    """Return the rank that has failed last, if it was one."""
    causes = [report["cause"] for report in content.get("reports", ()) if report["cause"] is not None]
    rank: int | None = causes[-1].get("rank") if causes else None
    return rank


def _sentence(story: Story, is_followed: bool) -> str:
    """Return what came of it; why, the report says where one follows."""
    sentence = story.summary.sentence
    return sentence.partition(": ")[0].removesuffix(".") + "." if is_followed else sentence


def _facts(story: Story, now: float) -> str:
    width = counted(len(story.nodes), "node") + (f" x {story.nproc}" if story.nproc else "")
    parts = [width]
    if story.restarts:
        parts.append(counted(story.restarts, "restart"))
    if story.began is not None:
        parts.append("began " + datetime.fromtimestamp(story.began).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"))
    if story.records and not story.summary.is_over:
        parts.append(f"the last record is {duration(now - story.records[-1].time)} old")
    return ", ".join(parts)


def _progress(story: Story, known: Mapping[str, Any] | None) -> list[str]:
    """Return how far the launch is, or was, with rank 0's last values."""
    if known is None:
        return []
    is_running = story.summary.outcome == "running"
    parts = [progress.step(known), progress.speed(known), progress.left(known) if is_running else ""]
    lines = [", ".join(part for part in parts if part)]
    if known["last"]:
        values = ", ".join(f"{key} {progress.number(value)}" for key, value in known["last"].items())
        lines.append(f"last values of rank 0: {values}")
    lines.append(progress.rates(known))
    if is_running:
        lines += progress.stragglers(known, {number: node.host for number, node in story.nodes.items()})
    return [printable(line[0].upper() + line[1:]) for line in lines if line]


def _is_handled(report: Mapping[str, Any]) -> str:
    return "all workers were started again after this" if report["error"] is None else f"run raised {report['error']}"


def title(facts: Facts) -> str:
    """Return the line that names a gang, and of what run's step it was cloned."""
    tries = f", attempt {facts.attempt}" if facts.last_attempt else ""
    latest = f" (the latest is {facts.last_attempt})" if facts.attempt < facts.last_attempt else ""
    clone = f", which run {facts.clone[0]} has cloned as task {facts.clone[1]}" if facts.clone else ""
    return f"Run {facts.run}, step {facts.step}, task {facts.control_task}{tries}{latest}{clone}"


def _nodes(facts: Facts, story: Story) -> list[str]:
    rows = []
    for number, node in sorted(story.nodes.items()):
        seconds, ranks = story.seconds_of(number), _ranks(story.ranks_of(number))
        codes = story.exit_codes[number].values()
        ends = exit_codes(codes) if story.has_ended(number) else ""
        known = [str(number), node.host, facts.tasks.get(number, "-"), ranks, story.state_of(number)]
        rows.append([*known, "" if seconds is None else f"{seconds:.1f}", ends])
    header = ("node", "host", "task", "ranks", "state", "seconds", "exit codes")
    return table(header, rows, right=("node", "seconds"))


def _events(story: Story) -> list[str]:
    return table(("seconds", "launch", "what happened"), timeline(story.records), right=("seconds",))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return shortened(ranks)


def exit_codes(ends: Iterable[int | None]) -> str:
    """Return how the ranks of a node ended, in the order of ranks, or of many how many ended in which way."""
    codes = [_code(code) for code in ends]
    if len(codes) <= _CODES:
        return " ".join(codes)
    return ", ".join(f"{count} x {code}" for code, count in Counter(codes).most_common())


def _code(code: int | None) -> str:
    if code is None:
        return "unknown"
    return str(code) if code >= 0 else signal_name(-code)
