"""Whatever `warm` is, a program sees the same and ends the same.

The programs are in ``flows/observed``: they note all that they can see of themselves. They run cold and warm in launches
of one step, and what they have seen is compared key by key. How they end is compared with plain ``python -u``, too.
"""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flow_runs import FLOWS, FlowRun, heed_ctrl_c
from sameness import Allowed, differences, shared

VARIANTS = ("agent", "workers")
THREADS = "2"  # the same in all launches, whatever their number of workers
ENDINGS = "observed/endings.py"
DEADLINE_S = 350  # for two dozen launches on a machine that is busy with others; alone they take half a minute

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
    Allowed("settings: gc frozen", f"{TORCH_IS_THERE}, and no collection looks at it", lambda cold, warm: cold < warm),
    Allowed("status: SigCgt", "the C library's own signal, for its threads", with_33),
]
WITH_TORCH = [
    Allowed("torch modules", "torchrun is imported already", more),
    Allowed("loggers", "torchrun is imported already, and its loggers", lambda cold, warm: cold.items() < warm.items()),
]
IN_FORKS = [Allowed("fork: status SigCgt", "as that of their parent", with_33)]

# What a program can see of that it is warm: of a warm agent nothing but that.
ALLOWED: dict[str, list[Allowed]] = {"agent": STARTED_WARM, "workers": AT_BEGIN}
MAY_SHARE: dict[str, list[str]] = {"agent": [], "workers": ["hash of a text"]}


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
    def folder(self) -> Path:
        """Where the flow lies."""
        return self.flow.out.parent / "flow folder"

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
    """Programs that note what they see."""
    launches = [
        {"name": "script", "change": CHANGE, "run": {"entrypoint": "../a link.py", "entrypoint_args": HOSTILE}},
        {"name": "module", "run": {"entrypoint": "observed", "module": True, "entrypoint_args": HOSTILE}},
        {
            "name": "restarted",
            "run": {"entrypoint": "observed/once.py", "max_restarts": 1, "nproc_per_node": 1, "cwd": "sub folder"},
        },
        {
            "name": "program",
            "change": CHANGE,
            "run": {
                "entrypoint": "../observed/program.sh",
                "entrypoint_args": HOSTILE,
                "nproc_per_node": 1,
                "torchrun_args": {"no_python": True},
            },
        },
        {"name": "stopped", "run": {"entrypoint": "observed/stopped.py"}},
        {"name": "alone", "run": {"entrypoint": "observed/alone.py"}, "variants": ["workers"]},
        {"name": "function alone", "run": {}, "variants": ["workers"]},
        {"name": "function alone, gathered", "run": {"gather": True}, "variants": ["workers"]},
        # Last, since nobody can take a process's niceness back.
        {"name": "limited", "change": LIMITED, "run": {"entrypoint": "observed/plainly.py", "nproc_per_node": 1}},
    ]
    return ran(start_shared_flow, launches, nproc_per_node=2, preload=["numpy.random"])


@pytest.mark.xdist_group("warm: seen")
def test_ranks_that_train_without_a_process_group_are_told_of_and_no_others(seeing: Launches):
    """Others have had one and destroyed it, or never used torch, which is imported in each forked worker."""
    told = re.findall(
        r"warning: in launch (\d+) each of the 2 ranks has trained by itself.*(init[\w('=)]*)", seeing.text
    )
    wanted = [("alone", "init_process_group()"), ("function alone", "init='auto')")]
    assert told == [(str(seeing.of(name, "workers").number), remedy) for name, remedy in wanted]


@pytest.mark.xdist_group("warm: seen")
@pytest.mark.parametrize("variant", VARIANTS)
class TestSeen:
    def test_a_script_sees_the_same(self, seeing: Launches, variant: str):
        with_torch = WITH_TORCH if variant == "workers" else []
        assert differences(seeing.pairs("script", variant), [*ALLOWED[variant], *with_torch]) == []

    def test_a_module_sees_the_same(self, seeing: Launches, variant: str):
        assert differences(seeing.pairs("module", variant), ALLOWED[variant]) == []

    def test_what_a_process_has_from_its_begin_is_the_same(self, seeing: Launches, variant: str):
        """So such a launch begins cold."""
        assert differences(seeing.pairs("limited", variant)) == []

    def test_so_it_is_after_a_restart(self, seeing: Launches, variant: str):
        pairs = seeing.pairs("restarted", variant, generation=1)
        assert differences(pairs, ALLOWED[variant]) == []

    def test_no_random_state_is_shared(self, seeing: Launches, variant: str):
        names = ("script", "module")
        cold, warm = (
            [rank["random"] for name in names for rank in seeing.of(name, each).seen("seen").values()]
            for each in ("cold", variant)
        )
        assert shared(warm, cold, MAY_SHARE[variant]) == []

    @pytest.mark.parametrize("name", ["program", "stopped"])
    def test_it_writes_the_same_and_ends_the_same(self, seeing: Launches, name: str, variant: str):
        cold, warm = seeing.of(name, "cold"), seeing.of(name, variant)
        assert warm.codes == cold.codes
        assert sorted(cold.codes.values()) in ([-12], [1, 21])
        for stream in ("stdout", "stderr"):
            assert warm.written(stream) == cold.written(stream)


# --- processes of its own ---------------------------------------------------------------------------


BROKEN = {
    "empty": b"",
    "syntax": b"print('not reached')\nif True print(1)\n",
    "indented": b"def f():\n  return 1\n return 2\n",
    "null": b"a = 1\0\n",
    "latin": b"# -*- coding: latin-1 -*-\nprint('l\xf6ss', __file__)\n",
    "not utf-8": b"print('l\xf6ss')\n",
    "unknown coding": b"# -*- coding: no-such -*-\n",
    "marked": b"\xef\xbb\xbfprint('after a mark')\n",
    "asks": b"import __main__, inspect, sys\ndef f(): pass\nprint(inspect.getsource(f), __main__.f is f)\nsys.exit(2)",
}


def broken_programs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make programs in a folder, most of which end as soon as they begin; yield arguments of `run`, with a name."""
    for name, source in BROKEN.items():
        (folder / f"{name}.py").write_bytes(source)
        yield name, {"entrypoint": f"{name}.py"}
    (folder / "without_main").mkdir()
    for name in ("no_such_module", "observed.no_such", "without_main"):
        yield f"-m {name}", {"entrypoint": name, "module": True}
    py_compile.compile(str(folder / "asks.py"), str(folder / "compiled.pyc"))
    with zipfile.ZipFile(folder / "packed.pyz", "w") as packed:
        packed.writestr("__main__.py", "import beside\nprint(__name__, __file__, __spec__.name, beside)\n")
        packed.writestr("beside.py", "")
    (folder / "beside").mkdir()
    (folder / "beside" / "numbers.py").write_text("Number = 'its own'")
    (folder / "beside" / "program.py").write_text("import numbers\nprint(numbers.Number)\n")
    yield from ((name, {"entrypoint": name}) for name in ("compiled.pyc", "packed.pyz", "beside/program.py"))


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder with programs, and what runs each of them."""
    folder = tmp_path_factory.mktemp("programs")
    return folder, {name: {**run, "cwd": str(folder)} for name, run in broken_programs(folder)}


@pytest.fixture(scope="module")
def starting(start_shared_flow, others) -> Launches:
    """Programs that start processes, a function, and programs that are wrong."""
    named = [{"name": name, "run": run, "variants": ["workers"]} for name, run in others[1].items()]
    launches = [
        {"name": "processes", "run": {"entrypoint": "observed/processes.py"}},
        {"name": "loaders", "run": {"entrypoint": "observed/loaders.py"}, "variants": ["cold", "workers"]},
        {"name": "function", "run": {}, "variants": ["cold", "workers"]},
        *named,
    ]
    return ran(start_shared_flow, launches, nproc_per_node=1)


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

    def test_a_function_sees_the_same(self, starting: Launches):
        assert differences(starting.pairs("function", "workers"), AT_BEGIN) == []

    def test_what_is_wrong_with_a_program_is_told_as_by_plain_python(self, starting: Launches, others):
        folder, runs = others
        told = {}
        for name, run in runs.items():
            module = ["-m"] if run.get("module") else []
            plain = plainly([*module, str(run["entrypoint"]) if module else str(folder / run["entrypoint"])], folder)
            warm = starting.of(name, "workers")
            told[name] = (plain, (warm.codes[0], warm.written("stdout")[0], warm.written("stderr")[0]))
        assert {name: pair for name, pair in told.items() if pair[0] != pair[1]} == {}


def plainly(words: list[str], folder: Path, **variables: str) -> tuple[int, bytes, bytes]:
    """Return how a program ends that nobody but this test has started, and what it has written."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-u", *words],
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
        preexec_fn=heed_ctrl_c,
    )
    return done.returncode, without_addresses(done.stdout), without_addresses(done.stderr)


# --- ends -----------------------------------------------------------------------------------------


# What is written differently, and how to know it.
OTHER_WORDS: dict[str, dict[str, bytes]] = {
    "cold": {},
    "agent": {},
    "workers": {
        "aborts_and_tells": rb"\n\nExtension modules: .*",  # torch's, too
        # Until Python 3.11, calls of C functions count, and two stand below the script's first.
        **({"raises_many": rb"repeated \d+ more"} if sys.version_info < (3, 12) else {}),
    },
}


@pytest.fixture(scope="module")
def ending(start_shared_flow) -> Launches:
    """A rank for each way to end."""
    run = {"entrypoint": ENDINGS, "nproc_per_node": len(names_of_endings()), "torchrun_args": {"monitor_interval": 5}}
    return ran(start_shared_flow, [{"name": "endings", "run": run}])


def names_of_endings() -> list[str]:
    command = [sys.executable, str(FLOWS / ENDINGS), "names"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def expected(ending: Launches) -> dict[str, tuple[int, bytes, bytes]]:
    """How the same programs end without torchrun, and what they write."""
    folder, names = ending.of("endings", "cold").folder, names_of_endings()

    def run(local_rank: int) -> tuple[int, bytes, bytes]:
        return plainly([str(folder / ENDINGS)], folder, LOCAL_RANK=str(local_rank))

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(run, range(len(names))), strict=True))


@pytest.mark.xdist_group("warm: ends")
@pytest.mark.parametrize("variant", ["cold", *VARIANTS])
class TestEnds:
    def test_ends_and_last_words_are_those_of_plain_python(self, ending: Launches, expected, variant: str):
        launch = ending.of("endings", variant)
        out, err = launch.written("stdout"), launch.written("stderr")
        ended = {name: (launch.codes[rank], out[rank], err[rank]) for rank, name in enumerate(expected)}
        differing = {name for name in expected if ended[name] != expected[name]}
        neutral = OTHER_WORDS[variant]
        told = {name: (expected[name], ended[name]) for name in differing - set(neutral)}
        assert told == {}
        assert differing == set(neutral), "an allowed difference is no more"
        for name, pattern in neutral.items():
            plain, warm = ((code, out, re.sub(pattern, b"", err)) for code, out, err in (expected[name], ended[name]))
            assert warm == plain
