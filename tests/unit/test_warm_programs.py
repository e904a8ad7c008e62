"""Programs in workers that were spares are told wrong, and end, as by plain ``python -u``; so they are in cold workers."""

import json
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from flow_runs import FLOWS, heed_ctrl_c
from warm_nodes import Warm

ENDINGS = str(FLOWS / "observed" / "endings.py")
VARIANTS = ("cold", "spare")

pytestmark = pytest.mark.timeout(180)


def plainly(words, folder, **variables):
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


def without_addresses(text):
    """Return a text without addresses in memory."""
    return re.sub(rb"0x[0-9a-f]{8,}", b"0x", text)


def in_workers(folder, variant, programs, cwd):
    """Return the same of workers of one agent, each with words of its own."""
    node = Warm(folder, workers=len(programs) if variant == "spare" else 0)
    try:
        node.spares()
        agent = node.start("each", workers=len(programs), script=[json.dumps(programs)], cwd=str(cwd))
        agent.end()
        codes = json.loads((agent.out.parent / f"{agent.out.name}.codes").read_text())
        texts = [[agent.written(number, stream) for stream in ("out", "err")] for number in range(len(programs))]
        told = (folder / "agent.stderr").read_text()
    finally:
        node.close()
    return [(code, *map(without_addresses, each)) for code, each in zip(codes, texts, strict=True)], told


# --- what is wrong with a program -----------------------------------------------------------------


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


def programs_in(folder):
    """Make programs in a folder, most of which end as soon as they begin; return the words that run each, by a name."""
    for name, source in BROKEN.items():
        (folder / f"{name}.py").write_bytes(source)
    (folder / "without_main").mkdir()
    py_compile.compile(str(folder / "asks.py"), str(folder / "compiled.pyc"))
    with zipfile.ZipFile(folder / "packed.pyz", "w") as packed:
        packed.writestr("__main__.py", "import beside\nprint(__name__, __file__, __spec__.name, beside)\n")
        packed.writestr("beside.py", "")
    (folder / "beside").mkdir()
    (folder / "beside" / "numbers.py").write_text("Number = 'its own'")
    (folder / "beside" / "program.py").write_text("import numbers\nprint(numbers.Number)\n")
    files = [*(f"{name}.py" for name in BROKEN), "compiled.pyc", "packed.pyz", "beside/program.py", "no such.py"]
    modules = ("no_such_module", "no_such_package.no_such", "without_main", "asks")
    return [*([str(folder / name)] for name in files), *(["-m", name] for name in modules)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_wrong_with_a_program_is_told_as_by_plain_python(tmp_path, variant):
    folder = tmp_path / "programs"
    folder.mkdir()
    programs = programs_in(folder)
    seen, told = in_workers(tmp_path, variant, programs, folder)
    plain = [plainly(words, folder) for words in programs]
    assert {words[-1]: pair for words, *pair in zip(programs, plain, seen, strict=True) if pair[0] != pair[1]} == {}
    assert ("A worker starts cold: " in told) == (variant == "spare")


# --- ends -------------------------------------------------------------------------------------------


# What is written differently, and how to know it.
OTHER_WORDS = {
    "cold": {},
    "spare": {
        **dict.fromkeys(("aborts_and_tells", "tells_where_it_is"), rb"\n  File \S+/spare\.py\", line \d+ in <module>"),
        # Until Python 3.11, calls of C functions count, too: `exec` is one.
        "raises_many": rb"repeated \d+ more",
    },
}


def names_of_endings():
    command = [sys.executable, ENDINGS, "names"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """How the programs end without torchrun, and what they write."""
    folder = tmp_path_factory.mktemp("plain")
    with ThreadPoolExecutor(4) as pool:
        run = lambda number: plainly([ENDINGS], folder, LOCAL_RANK=str(number))  # noqa: E731
        return folder, dict(zip(names := names_of_endings(), pool.map(run, range(len(names))), strict=True))


@pytest.mark.xdist_group("endings")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ends_and_last_words_are_those_of_plain_python(expected, tmp_path, variant):
    folder, plain = expected
    seen, _ = in_workers(tmp_path, variant, [[ENDINGS]] * len(plain), folder)
    ended = dict(zip(plain, seen, strict=True))
    differing = {name for name in plain if ended[name] != plain[name]}
    neutral = OTHER_WORDS[variant]
    assert {name: (plain[name], ended[name]) for name in differing - set(neutral)} == {}
    assert differing == set(neutral), "an allowed difference is no more"
    for name, pattern in neutral.items():
        first, second = ((code, out, re.sub(pattern, b"", err)) for code, out, err in (plain[name], ended[name]))
        assert second == first
