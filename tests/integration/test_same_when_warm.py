"""Whatever `warm` is, a program sees the same and ends the same.

The programs are in ``flows/observed``: they note what they can see of themselves. They run cold and warm in launches
of one step, and what they have seen and how they have ended is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from flow_runs import FlowRun, StartFlow

THREADS = "2"  # the same in all launches, whatever their number of workers
DEADLINE_S = 440  # for nine launches on a machine that is busy with others; alone they take half a minute
COLD = False
HOSTILE = ["", "-x", "--nnodes=9", "a\tb", "$HOME ${local_rank} $$", "*", "--", "-c", "löss 🔥", "\udcff"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(DEADLINE_S + 30)]


# --- what may differ ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowed:
    """A difference that may be: it must then be there, too, or the table tells of what is no more."""

    key: str
    why: str
    fits: Callable[[Any, Any], bool]  # what the two are to each other


def more(cold: list[Any], warm: list[Any]) -> bool:
    return set(cold) < set(warm)


def in_between(cold: list[Any], warm: list[Any]) -> bool:
    """Tell whether there is more, and nothing in another order."""
    rest = iter(warm)
    return len(cold) < len(warm) and all(each in rest for each in cold)


def with_33(cold: list[str], warm: list[str]) -> bool:
    """Tell whether only signal 33 is caught besides."""
    return int(warm[0], 16) - int(cold[0], 16) == 1 << 32


OF_AGENT = [Allowed("process: the agent was started warm", "it was", lambda cold, warm: (cold, warm) == (False, True))]
OF_WORKERS = [
    *OF_AGENT,
    Allowed("modules", "torch is imported already", more),
    Allowed("python: warnings", "torch's filters", in_between),
    Allowed("exit handlers", "torch's", lambda cold, warm: cold < warm),
    Allowed("process: status SigCgt", "the C library's own signal, for its threads", with_33),
    Allowed("process: status Threads", "numpy's", lambda cold, warm: int(warm[0]) > int(cold[0])),
    Allowed("main: stack", "a frame of the spare is below the script's first", lambda cold, warm: warm[:-1] == cold),
    Allowed("process: command line", "the spare's", lambda cold, warm: any("spare.py" in word for word in warm)),
]
OF_SCRIPTS = [*OF_WORKERS, Allowed("modules with torch", "`preload` is imported already", more)]


def differences(seen: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], allowed: Sequence[Allowed]) -> list[str]:
    """Return what is not the same in pairs of cold and warm, and what was allowed and is the same in all of them."""
    found, used = [], set()
    for cold, warm in seen:
        for key in sorted({*cold, *warm}):
            if (key in cold) == (key in warm) and cold.get(key) == warm.get(key):
                continue
            entry = next((each for each in allowed if each.key == key), None)
            if entry is not None and key in cold and key in warm and entry.fits(cold[key], warm[key]):
                used.add(entry)
            else:
                found.append(f"{key}: cold {cold.get(key, 'absent')!r}, warm {warm.get(key, 'absent')!r}")
    return found + [f"allowed, but the same: {each.key} ({each.why})" for each in allowed if each not in used]


# --- the launches -------------------------------------------------------------------------------------


def pairs(flow: FlowRun, name: str, variant: str, generation: int, what: str) -> list[tuple[Any, Any]]:
    """Return what ranks have seen cold, each with what they have seen warm."""
    numbers = [flow.note("launches").index([name, each]) for each in (COLD, variant)]
    seen = [flow.notes(f"seen-launch{number}-{generation}-*.json") for number in numbers]
    assert [len(each) for each in seen] == [2, 2], flow.text
    return [(cold[what], warm[what]) for cold, warm in zip(*seen, strict=True)]


@pytest.fixture(scope="module")
def seeing(start_shared_flow: StartFlow) -> FlowRun:
    """Programs that note what they see, in gangs of two ranks.

    A warm agent starts any program as torchrun does. So one that sees all that it can is enough for it. The first
    launch with other variables or another folder is cold, and the next one has spares for them.
    """
    both = [COLD, "workers"]
    failing = {"entrypoint": "observed", "module": True, "entrypoint_args": HOSTILE, "max_restarts": 1}
    failing["cwd"] = ".."
    script = {"entrypoint": "../a link.py", "entrypoint_args": HOSTILE}
    launches = [
        {"name": "script, before", "run": script, "variants": ["workers"]},
        {"name": "script", "run": script, "variants": [*both, "agent"]},
        {"name": "function", "run": {}, "variants": both},
        {"name": "module, before", "run": failing, "variants": ["workers"]},
        {"name": "module", "run": failing, "variants": both},
    ]
    env = {"WARM_LAUNCHES": json.dumps(launches), "OMP_NUM_THREADS": THREADS, "FROM_BEFORE": "1"}
    flow = start_shared_flow(flow="warm.py", env=env)
    assert flow.wait(DEADLINE_S) == 0, flow.text
    return flow


@pytest.mark.parametrize(
    ("name", "variant", "generation", "allowed"),
    [
        ("script", "agent", 0, OF_AGENT),
        ("script", "workers", 0, OF_SCRIPTS),
        ("function", "workers", 0, OF_WORKERS),
        ("module", "workers", 0, OF_WORKERS),
        ("module", "workers", 1, OF_WORKERS),
    ],
    ids=["script of a warm agent", "script", "function", "module", "module that was restarted"],
)
@pytest.mark.xdist_group("warm: seen")
def test_it_sees_the_same(seeing: FlowRun, name: str, variant: str, generation: int, allowed: list[Allowed]) -> None:
    assert differences(pairs(seeing, name, variant, generation, "same"), allowed) == []
    drawn = [value for pair in pairs(seeing, name, variant, generation, "random") for value in pair]
    assert all(len(set(values)) == 4 for values in zip(*drawn, strict=True)), drawn


LOOKED_UP = """
import importlib, os
class Noting(dict):
    names = set()
    def __getitem__(self, name):
        self.names.add(os.fsdecode(name))
        return super().__getitem__(name)
    __contains__ = lambda self, name: bool(self.names.add(os.fsdecode(name)) or name in self.keys())
from metaflow_extensions.torchrun.plugins.torchrun.worker.spare_process import READ_AT_START
os.environ._data = Noting(os.environ._data)
importlib.import_module("torch.distributed.run")
print(*[name for name in sorted(Noting.names - set(os.environ)) if not name.startswith(READ_AT_START)])
"""


def test_each_variable_that_torch_looks_up_when_it_is_imported_counts() -> None:
    """Also those of another torch: then this list is to be made longer."""
    command = [sys.executable, "-c", LOOKED_UP]
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
