"""Checkpoints of a distributed job: in Metaflow's datastore under @checkpoint, else in a folder.

A checkpoint has one or more parts. One process saves each part, a folder. The checkpoint is complete when all parts are
there. So a job that ends while it saves leaves the former checkpoint as the last one.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class InMetaflow:
    """The checkpoints of a training that `@checkpoint` stores: of all attempts, also in runs that resume it."""

    def __init__(self, training: str) -> None:
        self.training = training

    def save(self, part: Path, about: dict[str, int]) -> None:
        from metaflow import Checkpoint

        # Each process numbers its checkpoints from 0, also after a restart. So without its own name, this one would
        # overwrite an earlier one.
        name = "-".join(f"{word}{number}" for word, number in about.items())
        Checkpoint().save(str(part), name=name, metadata={"training": self.training, **about})

    def parts(self) -> Iterator[tuple[dict[str, Any], Any]]:
        from metaflow import Checkpoint

        for found in Checkpoint().list(full_namespace=True):  # of all runs
            if found["metadata"].get("training") == self.training:
                run = found["pathspec"].split("/")[1]
                yield {"run": run, "attempt": int(found["attempt"]), **found["metadata"]}, found["key"]

    def load(self, key: Any, folder: Path) -> None:
        from metaflow import Checkpoint

        Checkpoint().load(key, str(folder))


class InFolder:
    """A folder that all nodes see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, part: Path, about: dict[str, int]) -> None:
        name = ".".join(f"{word}-{number}" for word, number in about.items())
        shutil.copytree(part, self.folder / f"{name}.unfinished", dirs_exist_ok=True)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        os.replace(self.folder / f"{name}.unfinished", self.folder / name)

    def parts(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for path in self.folder.glob("*"):
            if path.suffix != ".unfinished":
                about = dict(word.split("-") for word in path.name.split("."))
                yield {"run": "", "attempt": 0, **{word: int(number) for word, number in about.items()}}, path

    def load(self, key: Any, folder: Path) -> None:
        shutil.copytree(key, folder, dirs_exist_ok=True)


def open_store(folder: Path, training: str) -> InMetaflow | InFolder:
    """Return the store: a task with @checkpoint has this variable, and its workers inherit it."""
    return InMetaflow(training) if "METAFLOW_CHECKPOINT_UID" in os.environ else InFolder(folder)


def save_part(store: InMetaflow | InFolder, folder: Path, step: int, part: int = 0, parts: int = 1) -> None:
    """Save this process's part of the checkpoint after `step` steps."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store.save(folder, {"step": step, "restart": restart, "part": part, "parts": parts})


def find_last(store: InMetaflow | InFolder) -> tuple[int, list[Any]] | None:
    """Return the last complete checkpoint: its number of steps, and the keys of its parts."""
    found: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for about, key in store.parts():
        found[about["step"], about["run"], about["attempt"], about["restart"], about["parts"]].append(key)
    whole = [checkpoint for checkpoint, keys in found.items() if len(keys) == checkpoint[-1]]
    return (max(whole)[0], found[max(whole)]) if whole else None
