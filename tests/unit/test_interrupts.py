"""What signals do to the submitting processes: real processes, each a script that uses the module as the decorator does."""

import signal
import subprocess
import sys

import pytest
from unit_helpers import OURS

IMPORTS = f"""{OURS}
import atexit, os, signal, subprocess, sys
from ours.submit import interrupts
"""
# Says what reaches it; a child that is told to go in the background is in a session of its own.
CHILD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda n, f: sys.exit(signal.Signals(n).name))
os.write(1, b"child\\n")
signal.pause()
"""
RUN = f"""
interrupts.heed_signals_to_run()
children = [
    subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=1, stderr=subprocess.PIPE, text=True, start_new_session=own)
    for own in (False, True)
]
try:
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()  # meanwhile the test sends another signal
    print("near", children[0].communicate()[1].strip(), "far", children[1].poll(), flush=True)
    children[1].kill()
    children[1].communicate()
    sys.exit(7)
"""
JOB = """
atexit.register(lambda: print("job ended", sys.stdin.readline().strip(), flush=True))
interrupts.heed_signals_to_job(sys.argv)
print("ready", flush=True)
signal.pause()
"""


def start(code, *arguments, ignored=()):
    """Start a script as a shell starts a command, with some signals ignored."""

    def prepare():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-c", IMPORTS + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
        start_new_session=True,
    )


def await_lines(process, *lines):
    for line in lines:
        assert process.stdout.readline().strip() == line


@pytest.mark.parametrize(
    ("number", "ignored", "passed_on"), [(signal.SIGTERM, (), "SIGINT"), (signal.SIGHUP, (signal.SIGINT,), "SIGTERM")]
)
def test_a_run_and_its_tasks_are_interrupted_once(number, ignored, passed_on):
    run = start(RUN, ignored=ignored)
    await_lines(run, "child", "child")
    run.send_signal(number)
    await_lines(run, "interrupted")
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate("go on\n")
    assert out.strip() == f"near {passed_on} far None"
    assert f"{number.name}: the run is interrupted" in err
    assert run.returncode == 7


@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGTERM, "kubernetes"), (signal.SIGHUP, "batch"), (signal.SIGINT, "kubernetes")]
)
def test_who_looks_after_a_remote_job_ends_it_undisturbed(number, backend):
    job = start(JOB, "--quiet", backend, "step", "train")
    await_lines(job, "ready")
    job.send_signal(number)
    assert "interrupted" in job.stderr.readline()
    for again in (signal.SIGTERM, signal.SIGINT):
        job.send_signal(again)
    assert job.communicate("well\n")[0].strip() == "job ended well"


def test_other_processes_nohup_and_handlers_of_others_stay():
    code = """
signal.signal(signal.SIGTERM, print)
interrupts.heed_signals_to_run()
interrupts.heed_signals_to_job(["flow.py", "step", "train"])
print([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)])
"""
    kept = [print, signal.SIG_IGN, signal.SIG_IGN]
    ignored = (signal.SIGHUP, signal.SIGINT)
    assert start(code, ignored=ignored).communicate()[0].strip() == str(kept)
