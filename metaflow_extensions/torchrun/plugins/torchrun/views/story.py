"""What is known of one attempt of one gang, as the datastore has it? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..gang.history import Record
from ..records.summary import Summary, summarize


class Story:
    """A gang's records, and what they amount to."""

    def __init__(self, content: Mapping[str, Any], until_s: float | None = None) -> None:
        self.records = [Record.from_dict(each) for each in content.get("events", ())]
        self.reports: list[Mapping[str, Any]] = list(content.get("reports", ()))
        self.nproc: int | None = content.get("nproc_per_node")
        self.summary: Summary = summarize(self.records, content.get("num_nodes", 0), self.nproc, until_s)
        self.nodes = {node.index: node for node in self.summary.nodes}
        self.restarts = sum(record.kind == "restart" for record in self.records)

    @property
    def began(self) -> float | None:
        """When the gang began, in seconds since 1970."""
        return self.records[0].time - self.records[0].at_s if self.records else None

    @cached_property
    def exit_codes(self) -> dict[int, dict[int, int | None]]:
        """How the ranks of each node ended in the last generation; None: it is not known, or has not ended."""
        found: dict[int, dict[int, int | None]] = {node: {} for node in self.nodes}
        for record in self.records:
            if record.kind == "go":
                found = {node: {} for node in self.nodes}
            elif record.kind == "exited" and record.node in found and record.rank is not None:
                found[record.node][record.rank] = record.exit_code
        return {node: dict(sorted({**self._expected(node, codes), **codes}.items())) for node, codes in found.items()}

    def _expected(self, node: int, known: Mapping[int, int | None]) -> dict[int, int | None]:
        """Return the ranks that a node should have; torchrun's own elasticity may have given it others."""
        ranks = range(0) if not self.nproc else range(node * self.nproc, (node + 1) * self.nproc)
        return dict.fromkeys(ranks if set(ranks).issuperset(known) else (), None)

    def has_ended(self, node: int) -> bool:
        """Tell whether workers of a node have run in the last launch, and are gone."""
        if any(code is not None for code in self.exit_codes[node].values()):
            return True
        has_begun = any(record.kind == "go" for record in self.records)
        states = [rank.state for rank in self.summary.ranks if rank.node == node]
        return has_begun and all(state in ("done", "failed", "stopped", "lost") for state in states)

    def state_of(self, node: int) -> str:
        """Say in a word or two what a node does, or how it ended."""
        return self.nodes[node].word

    def seconds_of(self, node: int) -> float | None:
        """Return how long a node was in the gang; None if it has not joined."""
        spans = [span for span in self.nodes[node].spans if span.state != "missing"]
        return round(sum(span.end_s - span.begin_s for span in spans), 3) if spans else None

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank; None where that is not known."""
        known = next((node for node, codes in self.exit_codes.items() if rank in codes), None)
        place = rank // self.nproc if known is None and self.nproc else known
        return place if place in self.nodes else None

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, in the last generation."""
        return list(self.exit_codes.get(node, ()))
