"""Whatever `warm` is, a program sees the same and ends the same.

The programs are in ``flows/observed``: they note all that they can see of themselves. They run cold and warm in launches
of one step, and what they have seen is compared key by key. How they end is compared with plain ``python -u``, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from flow_runs import FlowRun
from sameness import Allowed, differences, shared

VARIANTS = ("agent", "workers")
THREADS = "2"  # the same in all launches, whatever their number of workers
ENDINGS = "observed/endings.py"
DEADLINE_S = 350  # for ten launches on a machine that is busy with others; alone they take half a minute

pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def more(cold: list[Any], warm: list[Any]) -> bool:
    return set(cold) < set(warm)


def in_between(cold: list[Any], warm: list[Any]) -> bool:
    """Tell whether there is more, and nothing in another order."""
    rest = iter(warm)
    return len(cold) < len(warm) and all(each in rest for each in cold)


def with_33(cold: list[str], warm: list[str]) -> bool:
    """Tell whether only signal 33 is caught besides."""
    return int(warm[0], 16) - int(cold[0], 16) == 1 << 32


STARTED_WARM = [
    Allowed("family: the agent was started warm", "it was", lambda cold, warm: (cold, warm) == (False, True))
]
TORCH_IS_THERE = "torch is imported already"
AT_BEGIN = [
    *STARTED_WARM,
    Allowed("modules", TORCH_IS_THERE, more),
    Allowed("settings: warnings", f"{TORCH_IS_THERE}, and its filters", in_between),
    Allowed("exit handlers", f"{TORCH_IS_THERE}, and what it does at exit", lambda cold, warm: cold < warm),
    Allowed("status: SigCgt", "the C library's own signal, for its threads", with_33),
    Allowed(
        "status: Threads", f"{TORCH_IS_THERE}, and numpy's threads", lambda cold, warm: int(warm[0]) > int(cold[0])
    ),
    Allowed("main: stack", "a frame of the spare is below the script's first", lambda cold, warm: warm[:-1] == cold),
    Allowed("command line", "the spare's", lambda cold, warm: any("spare.py" in word for word in warm)),
    Allowed("initial environment", "the spare's"),
]
WITH_TORCH = [Allowed("torch modules", "`preload` is imported already", more)]
IN_FORKS = [Allowed("fork: status SigCgt", "as that of their parent", with_33)]

# What a program can see of that it is warm: of a warm agent nothing but that.
ALLOWED: dict[str, list[Allowed]] = {"agent": STARTED_WARM, "workers": AT_BEGIN}


# --- the launches ---------------------------------------------------------------------------------


@dataclass
class Launch:
    """One launch of the flow, and where it left what."""

    number: int
    outcome: dict[str, Any]
    flow: FlowRun

    def seen(self, what: str, generation: int = 0) -> dict[int, dict[str, Any]]:
        """Return what its ranks have noted."""
        name = f"{what}-launch{self.number}-{generation}-"
        notes = {int(path.stem.removeprefix(name)): path for path in self.flow.out.glob(f"{name}*.json")}
        assert notes, f"{self.outcome}\n{self.flow.text}"
        return {rank: json.loads(path.read_text()) for rank, path in notes.items()}

    def written(self, stream: str) -> dict[int, bytes]:
        """Return what its ranks have written, in words that do not change from launch to launch."""
        (folder,) = self.flow.out.glob(f"logs/torchrun-node0-launch{self.number}-0-*")
        texts = {int(path.parent.name): path.read_bytes() for path in folder.glob(f"*/attempt_0/*/{stream}.log")}
        return {rank: self._stable(text.replace(bytes(folder), b"<folder>")) for rank, text in texts.items()}

    def _stable(self, text: bytes) -> bytes:
        text = re.sub(rb"launch%d-\d-[0-9a-f]{8}(_\w{8})?" % self.number, b"<run>", text)
        return without_addresses(text)

    @property
    def codes(self) -> dict[int, int]:
        return {int(rank): code for rank, code in self.outcome["exit_codes"].items()}


def without_addresses(text: bytes) -> bytes:
    """Return a text without addresses in memory."""
    return re.sub(rb"0x[0-9a-f]{8,}", b"0x", text)


class Launches:
    """All launches of one flow, by name and variant."""

    def __init__(self, flow: FlowRun) -> None:
        self._flow = flow
        self._outcomes = flow.note("launches-0")
        self.text = flow.text

    def of(self, name: str, variant: str) -> Launch:
        (number,) = [n for n, each in enumerate(self._outcomes) if (each["name"], each["variant"]) == (name, variant)]
        return Launch(number, self._outcomes[number], self._flow)

    def pairs(self, name: str, variant: str, what: str = "seen", generation: int = 0) -> list[tuple[Any, Any]]:
        """Return what ranks have seen cold, each with what they have seen warm."""
        cold, warm = (self.of(name, each).seen(what, generation) for each in ("cold", variant))
        assert cold.keys() == warm.keys()
        return [(cold[rank]["same"], warm[rank]["same"]) for rank in cold]


def ran(start, launches: list[dict[str, Any]], **attributes: Any) -> Launches:
    """Run a flow with these launches, each cold and in all variants, and return them."""
    env = {"WARM_LAUNCHES": json.dumps(launches), "WARM_VARIANTS": json.dumps(["cold", *VARIANTS])}
    flow = start(flow="warm.py", attrs=attributes, env={**env, "OMP_NUM_THREADS": THREADS, "FROM_BEFORE": "1"})
    assert flow.wait(DEADLINE_S) == 0, flow.text
    return Launches(flow)


ODD = {"A_TEXT": 'it\'s "quoted" \udcff\nand löng', "EMPTY": "", "FROM_BEFORE": None}
CHANGE = {"umask": 0o27, "cwd": "sub folder", "env": ODD, "signals": True}
# What a process has had since its begin, or reads then: after these changes a launch begins cold, and says why.
READ_AT_BEGIN = {"HOME": "/a home", "TZ": "Asia/Kolkata", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "error::UserWarning"}
LIMITED = {"env": READ_AT_BEGIN, "files": 777, "affinity": [0], "nice": 1}
HOSTILE = ["", "-x", "--nnodes=9", "a\tb", "$HOME ${local_rank} $$", "*", "--", "-c", "löss 🔥", "\udcff"]


@pytest.fixture(scope="module")
def seeing(start_shared_flow) -> Launches:
    """Programs that note what they see, in gangs of two ranks.

    A warm agent starts any program as torchrun does. So one that sees all that it can is enough for it.
    """
    restarts = {"entrypoint": "observed", "module": True, "entrypoint_args": HOSTILE, "max_restarts": 1}
    launches = [
        {"name": "script", "change": CHANGE, "run": {"entrypoint": "../a link.py", "entrypoint_args": HOSTILE}},
        {"name": "alone", "run": {"entrypoint": "observed/alone.py"}, "variants": ["workers"]},
        {"name": "function", "run": {}, "variants": ["cold", "workers"]},
        {"name": "module", "run": restarts, "variants": ["cold", "workers"]},
    ]
    return ran(start_shared_flow, launches, nproc_per_node=2, warm="workers", preload=["numpy.random"])


@pytest.mark.xdist_group("warm: seen")
class TestSeen:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_script_sees_the_same(self, seeing: Launches, variant: str):
        with_torch = WITH_TORCH if variant == "workers" else []
        assert differences(seeing.pairs("script", variant), [*ALLOWED[variant], *with_torch]) == []

    def test_a_function_sees_the_same(self, seeing: Launches):
        assert differences(seeing.pairs("function", "workers"), AT_BEGIN) == []

    @pytest.mark.parametrize("generation", [0, 1], ids=["at first", "restarted"])
    def test_a_module_sees_the_same(self, seeing: Launches, generation: int):
        assert differences(seeing.pairs("module", "workers", generation=generation), AT_BEGIN) == []

    def test_a_module_that_is_stopped_writes_the_same_and_ends_the_same(self, seeing: Launches):
        same_ends(seeing, "module", {0: 21, 1: 1})

    @pytest.mark.parametrize(
        ("name", "generation", "variant"),
        [("script", 0, "agent"), ("script", 0, "workers"), ("module", 0, "workers"), ("module", 1, "workers")],
    )
    def test_no_random_state_is_shared(self, seeing: Launches, name: str, generation: int, variant: str):
        cold, warm = (
            [rank["random"] for rank in seeing.of(name, each).seen("seen", generation).values()]
            for each in ("cold", variant)
        )
        assert shared(warm, cold) == []

    def test_ranks_that_train_without_a_process_group_are_told_of_and_no_others(self, seeing: Launches):
        """Others have had one and destroyed it, or never used torch, which each spare worker has imported."""
        told = re.findall(
            r"warning: in launch (\d+) each of the 2 ranks has trained by itself.*(init[\w('=)]*)", seeing.text
        )
        wanted = [("alone", "workers", "init_process_group()")]
        wanted += [("function", variant, "init='auto')") for variant in ("cold", "workers")]
        assert told == [(str(seeing.of(name, variant).number), remedy) for name, variant, remedy in wanted]


def same_ends(launches: Launches, name: str, codes: dict[int, int]) -> None:
    """Check that the ranks have ended with these codes, cold and warm, and have written the same."""
    cold, warm = launches.of(name, "cold"), launches.of(name, "workers")
    assert warm.codes == cold.codes == codes
    for stream in ("stdout", "stderr"):
        assert warm.written(stream) == cold.written(stream)


# --- processes of its own, and of the step ------------------------------------------------------------


@pytest.fixture(scope="module")
def starting(start_shared_flow) -> Launches:
    """Programs that start processes, one that is no Python, and one that is started with other limits."""
    shell = {"entrypoint": "../observed/program.sh", "entrypoint_args": HOSTILE, "torchrun_args": {"no_python": True}}
    few = ["cold", "workers"]
    launches = [
        {"name": "processes", "run": {"entrypoint": "observed/processes.py"}},
        {"name": "loaders", "run": {"entrypoint": "observed/loaders.py"}, "variants": few},
        {"name": "program", "change": CHANGE, "run": shell, "variants": few},
        # Last, since nobody can take a process's niceness back.
        {"name": "limited", "change": LIMITED, "run": {"entrypoint": "observed/plainly.py", "cwd": "sub folder"}},
    ]
    return ran(start_shared_flow, launches, nproc_per_node=1, warm="workers")


@pytest.mark.xdist_group("warm: starts")
class TestStarts:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_processes_of_its_own_see_the_same(self, starting: Launches, variant: str):
        allowed = IN_FORKS if variant == "workers" else []
        assert differences(starting.pairs("processes", variant, "processes"), allowed) == []

    def test_torch_loads_and_compiles_the_same(self, starting: Launches):
        assert differences(starting.pairs("loaders", "workers", "loaders")) == []
        cold, warm = (starting.of("loaders", variant).seen("loaders")[0]["random"] for variant in ("cold", "workers"))
        assert not set(cold.values()) & set(warm.values())

    def test_what_is_no_python_writes_the_same_and_ends_the_same(self, starting: Launches):
        same_ends(starting, "program", {0: -12})

    def test_what_a_process_has_from_its_begin_is_the_same(self, starting: Launches):
        """So such a launch begins cold, and the next one, whose spares have begun with the same, begins warm."""
        on_one_core = [each for each in AT_BEGIN if each.keys != "status: Threads"]
        assert differences(starting.pairs("limited", "workers"), on_one_core) == []


# --- what counts ------------------------------------------------------------------------------------


LOOKED_UP = """
import importlib, os, sys
class Noting(dict):
    names = set()
    def __getitem__(self, name):
        self.names.add(os.fsdecode(name))
        return super().__getitem__(name)
    def __contains__(self, name):
        self.names.add(os.fsdecode(name))
        return super().__contains__(name)
from metaflow_extensions.torchrun.plugins.torchrun.features.warm.imports import Imports
from metaflow_extensions.torchrun.plugins.torchrun.features.warm.spare import AGENT
os.environ._data = Noting(os.environ._data)
importlib.import_module(AGENT)
names = sorted(Noting.names - set(os.environ))  # tqdm goes through all that there are
imports = Imports([], sys.path[0], computes=True)
print(*[name for name in names if not imports.counts(name)])
"""


def test_each_variable_that_torch_looks_up_when_it_is_imported_counts():
    """Also those of another torch: then this list is to be made longer."""
    command = [sys.executable, "-c", LOOKED_UP]
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
