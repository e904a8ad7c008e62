"""What is seen of a gang afterwards, by commands in new processes: `torchrun show`, `torchrun logs` and the card."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from flow_runs import content_of
from remote_flows import RemoteFlow

_WORD = re.compile(r"\[rank (\d+)\] word (\d+)")


class Seen:
    """The gang of a run, as somebody sees it who has the flow's file and the datastore, and nothing else."""

    def __init__(self, flow: RemoteFlow) -> None:
        self._flow, self.where = flow, f"{flow.run_id}/train"
        self._words: list[tuple[int | None, re.Match[str] | None]] | None = None
        self._elsewhere = flow.folder.parent / f"{flow.folder.name}-elsewhere"
        shutil.copytree(flow.folder, self._elsewhere, ignore=shutil.ignore_patterns(".metaflow", "run-id"))

    def show(self, *options: str) -> str:
        """Return the page of the gang."""
        return self._from_datastore("show", *options)

    def data(self, *options: str) -> dict[str, Any]:
        """Return the gang as ``--json`` has it."""
        gang: dict[str, Any]
        (gang,) = json.loads(self.show("--json", *options))["gangs"]
        return gang

    def lines(self, *options: str) -> list[dict[str, Any]]:
        """Return lines of the logs, as ``--json`` has them."""
        return [json.loads(line) for line in self._from_datastore("logs", "--json", *options).splitlines()]

    def outputs(self, *options: str) -> str:
        """Return what ``torchrun outputs`` prints, which lists the files of the gang or fetches them."""
        return self._from_datastore("outputs", *options)

    def stacks(self, *options: str) -> dict[str, Any]:
        """Ask the gang what its ranks do now."""
        asked: dict[str, Any] = json.loads(self._from_datastore("stacks", "--json", *options))
        return asked

    def words(self, rank: int) -> list[int]:
        """Return the numbers of the words that a talking rank has said, as `torchrun logs` shows them."""
        if self._words is None:  # a process for all ranks: each imports Metaflow, and what its datastore needs
            self._words = [(line["rank"], _WORD.match(line["text"])) for line in self.lines()]
        found = [(owner, match) for owner, match in self._words if match and match[1] == str(rank)]
        assert all(owner == rank for owner, _ in found)
        return [int(match[2]) for _, match in found]

    def cards(self, create: bool = False) -> list[str]:
        """Return what is on the cards that the control node's pods have left, or on one that is made now."""
        task = f"{self.where}/{self.data()['control_task']}"
        place = self._flow.folder, self._flow.env  # where the run was started
        if create:
            made = self._ask("card", "create", task, "--type", "torchrun", at=place)
            hashes = re.findall(r"hash: (\w+)", made)
        else:
            hashes = re.findall(r"Card Hash: (\w+)", self._ask("card", "list", task, "--type", "torchrun", at=place))
        pages = []
        for name in hashes:
            path = self._flow.folder / f"{name}.html"
            self._ask("card", "get", task, str(path), "--type", "torchrun", "--hash", name, at=place)
            pages.append(content_of(path.read_text()))
        return pages

    def _from_datastore(self, command: str, *options: str) -> str:
        home = {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self._elsewhere / "home"), "METAFLOW_DEFAULT_METADATA": "local"}
        env = {**self._flow.env, **home}
        return self._ask("torchrun", command, self.where, *options, at=(self._elsewhere, env))

    def _ask(self, *words: str, at: tuple[Path, dict[str, str]]) -> str:
        file = self._flow.process.args[1]  # type: ignore[index]  # a list of words
        argv = [sys.executable, file, "--no-pylint", *words]
        asked = subprocess.run(argv, cwd=at[0], env=at[1], capture_output=True, text=True, timeout=180)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        return asked.stdout + (asked.stderr if words[0] == "card" else "")


def check_failed(seen: Seen, *options: str, cause: str, states: list[str]) -> dict[str, Any]:
    """Check that a failed gang is shown with its cause first, and return it as data."""
    text, data = seen.show(*options), seen.data(*options)
    first = text.splitlines()[2]
    assert first.startswith("Failed "), text
    assert f": {cause}".lower() in first.lower(), text  # a node is named with a small letter here
    assert data["outcome"] == "failed"
    for node, state in zip(data["nodes"], states, strict=True):
        assert node["state"] in state.split(" or "), text
    assert [node["host"] for node in data["nodes"] if not node["host"]] == []
    assert f"(host {data['nodes'][1]['host']})" in first
    return data
