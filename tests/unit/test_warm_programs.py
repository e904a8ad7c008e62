"""Programs in workers that were spares are told wrong, and end, as by plain ``python -u``."""

import json
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

from flow_runs import heed_terminal
from warm_nodes import Warm

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

BEGIN = """
import asyncio, atexit, faulthandler, gc, os, resource, signal, subprocess, sys, threading, time, warnings
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
ENDINGS = {
    "returns": "print('at its end', end='')",
    "exits with a number": "sys.exit(261)",
    "exits with a text": "sys.exit('a text, lösung \\udcff')",
    "exits at once": "sys.stdout.write('written')\nos._exit(5)",
    "raises a chain": "try: {}['a key']\nexcept KeyError as error: raise RuntimeError('two\\nlines, ö \\udcff') from error",
    "raises in a context": "try: [][1]\nfinally: undefined_name",
    "raises what has no text": """
class OwnError(Exception):
    def __str__(self): raise ValueError("no text")
raise OwnError("hidden")""",
    "raises from afar": "def deep(count): return deep(count - 1) + 1\ndeep(3000)",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "fails in an exit handler": "atexit.register(lambda: 1 / 0)\natexit.register(print, 'the later one is first')",
    "exits in an exit handler": "atexit.register(sys.exit, 6)",
    "raises in a thread": "thread = threading.Thread(target=lambda: {}['of a thread'])\nthread.start()\nthread.join()",
    "ends before its thread": """
threading.Thread(target=lambda: (time.sleep(0.3), print("last, but for", threading.main_thread().is_alive()))).start()
atexit.register(print, "the exit handler")""",
    "has a hook": "sys.excepthook = lambda kind, error, trace: print('own', kind, error)\n1 / 0",
    "has a hook that calls the default": """
sys.excepthook = lambda *words: (print("first the own"), sys.__excepthook__(*words))
raise ValueError("for both hooks")""",
    "has no stderr": "sys.stderr = None\n1 / 0",
    "has a closed stderr": "os.close(2)\n1 / 0",
    "has closed its stdout": "sys.stdout.write('before')\nsys.stdout.close()",
    "has lost its stdout": "print('before')\nos.close(1)\nsys.stdout.write('after')",
    "writes in pieces": "sys.stdout.write('one ')\nos.write(1, b'two \\xff ')\nprint('three', end='')",
    "keeps objects": """
class Loud:
    def __del__(self): print("gone", sys.is_finalizing())
kept = Loud()
raise ValueError("with objects")""",
    "warns": "warnings.warn('a warning', stacklevel=1)\nopen(os.devnull)\ngc.collect()",
    "reads stdin": "print(repr(sys.stdin.read()), sys.stdin.isatty())\ninput()",
    "forks": """
sys.stdout.flush()
if (child := os.fork()) == 0: raise ValueError("in the child")
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))""",
    "becomes another": "os.execvp('sh', ['sh', '-c', 'echo from $0; exit 9', 'another'])",
    "becomes itself": """
if os.environ.get("AGAIN"): sys.exit(f"again {sys.argv} {sys.orig_argv[1:]}")
os.environ["AGAIN"] = "1"
os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])""",
    "runs a loop": """
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "handled")
    os.kill(os.getpid(), signal.SIGUSR1)
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 12")
    raise OSError(await child.wait(), "of the loop")
asyncio.run(main())""",
    "writes where nobody reads": "reader, writer = os.pipe()\nos.close(reader)\nos.write(writer, b'x')",
    "aborts and tells": "faulthandler.enable()\nos.abort()",
    "has no files left": "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nopen('/dev/null')",
    **{f"dies by {each:d}": f"os.kill(os.getpid(), {each:d})" for each in (1, 9, 11, 15, 37)},
}
# What is written differently, and how to know it.
OTHER_WORDS = {
    "aborts and tells": rb"\n  File \S+/spare\.py\", line \d+ in <module>",
    # Until Python 3.11, calls of C functions count, too: `exec` is one.
    "raises from afar": rb"repeated \d+ more",
}


def plainly(words, folder):
    """Return how a program ends that nobody but this test has started, and what it has written."""
    done = subprocess.run(
        [sys.executable, "-u", *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        preexec_fn=heed_terminal,
    )
    return done.returncode, without_addresses(done.stdout), without_addresses(done.stderr)


def without_addresses(text):
    """Return a text without addresses in memory."""
    return re.sub(rb"0x[0-9a-f]{8,}", b"0x", text)


def by_spares(root, programs, cwd):
    """Return the same of spare workers of one agent, each with words of its own."""
    node = Warm(root, workers=len(programs))
    try:
        node.spares()
        agent = node.start("each", workers=len(programs), script=[json.dumps(programs)], cwd=str(cwd))
        agent.end()
        codes = json.loads((agent.out.parent / f"{agent.out.name}.codes").read_text())
        texts = [[agent.written(number, stream) for stream in ("out", "err")] for number in range(len(programs))]
        told = (root / "agent.stderr").read_text()
    finally:
        node.close()
    return [(code, *map(without_addresses, each)) for code, each in zip(codes, texts, strict=True)], told


def programs_in(folder):
    """Make programs in a folder, most of which end as soon as they begin; return the words that run each."""
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


def compared(tmp_path, make_programs):
    """Run programs plainly and in spares; return both results by name, and what the agent has said."""
    folder = tmp_path / "programs"
    folder.mkdir()
    programs = make_programs(folder)
    seen, told = by_spares(tmp_path, programs, folder)
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda words: plainly(words, folder), programs))
    return {words[-1]: pair for words, *pair in zip(programs, plain, seen, strict=True)}, told


def test_what_is_wrong_with_a_program_is_told_as_by_plain_python(tmp_path):
    pairs, told = compared(tmp_path, programs_in)
    assert {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} == {}
    assert "A worker starts cold: " in told


def test_ends_and_last_words_are_those_of_plain_python(tmp_path):
    def make(folder):
        for name, source in ENDINGS.items():
            (folder / f"{name}.py").write_text(f"{BEGIN}{source}\n")
        return [[f"{name}.py"] for name in ENDINGS]

    pairs, told = compared(tmp_path, make)
    differing = {name.removesuffix(".py"): pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert differing.keys() == OTHER_WORDS.keys(), differing
    for name, pattern in OTHER_WORDS.items():
        plain, spare = ((code, out, re.sub(pattern, b"", err)) for code, out, err in differing[name])
        assert spare == plain
    assert told == ""
