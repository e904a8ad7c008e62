"""Programs in workers that were spares end as by plain ``python -u``."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from flow_runs import heed_terminal
from unit_helpers import write
from warm_nodes import Warm

BEGIN = """
import atexit, faulthandler, os, resource, signal, sys, threading, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
ENDINGS = {
    "returns": "print('at its end', end='')",
    "exits with a number": "sys.exit(261)",
    "exits with a text": "sys.exit('a text, lösung \\udcff')",
    "raises a chain": "try: {}['a key']\nexcept KeyError as error: raise RuntimeError('two\\nlines, ö \\udcff') from error",
    "raises from afar": "def deep(count): return deep(count - 1) + 1\ndeep(3000)",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "ends before its thread": """
threading.Thread(target=lambda: (time.sleep(0.3), print("last, but for", threading.main_thread().is_alive()))).start()
atexit.register(print, "the exit handler")""",
    "writes in pieces": "sys.stdout.write('one ')\nos.write(1, b'two \\xff ')\nprint('three', end='')",
    "keeps objects": """
class Loud:
    def __del__(self): print("gone", sys.is_finalizing())
kept = Loud()
raise ValueError("with objects")""",
    "aborts and tells": "faulthandler.enable()\nos.abort()",
    **{f"dies by {each:d}": f"os.kill(os.getpid(), {each:d})" for each in (9, 11, 15)},
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


def by_spares(root, programs):
    """Return the same of spare workers of one agent, each with words of its own."""
    node = Warm(root, workers=len(programs))
    try:
        node.spares()
        agent = node.start("each", workers=len(programs), script=[json.dumps(programs)])
        assert agent.end()["refused"] is None
        codes = json.loads((agent.out.parent / f"{agent.out.name}.codes").read_text())
        texts = [[agent.written(number, stream) for stream in ("out", "err")] for number in range(len(programs))]
        told = (root / "agent.stderr").read_text()
    finally:
        node.close()
    return [(code, *map(without_addresses, each)) for code, each in zip(codes, texts, strict=True)], told


def test_ends_and_last_words_are_those_of_plain_python(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    programs = [[str(write(folder / f"{name}.py", f"{BEGIN}{source}\n"))] for name, source in ENDINGS.items()]
    programs += [["-m", name] for name in ("no_such_module", "no_such_package.no_such", "returns")]
    monkeypatch.chdir(folder)
    seen, told = by_spares(tmp_path, programs)
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda words: plainly(words, folder), programs))
    pairs = zip([*ENDINGS, "no module", "none in a package", "a module"], plain, seen, strict=True)
    differing = {name: pair for name, *pair in pairs if pair[0] != pair[1]}
    assert differing.keys() == OTHER_WORDS.keys(), differing
    for name, pattern in OTHER_WORDS.items():
        plain, spare = ((code, out, re.sub(pattern, b"", err)) for code, out, err in differing[name])
        assert spare == plain
    assert told == ""
