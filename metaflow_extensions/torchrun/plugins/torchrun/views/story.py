"""What is known of one attempt of one gang, as the datastore has it? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..gang.history import Record
from ..gang.summary import Summary, summarize


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
        """How the ranks of each node ended in the last generation."""
        found: dict[int, dict[int, int | None]] = {node: {} for node in self.nodes}
        for record in self.records:
            if record.kind == "go":
                found = {node: {} for node in self.nodes}
            elif record.kind == "exited" and record.node in found and record.rank is not None:
                found[record.node][record.rank] = record.exit_code
        return {node: dict(sorted(codes.items())) for node, codes in found.items()}

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
        """Return the ranks of a node, in the last generation if their ends are known, or as they should be."""
        known = list(self.exit_codes.get(node, ()))
        return known or ([] if not self.nproc else list(range(node * self.nproc, (node + 1) * self.nproc)))
