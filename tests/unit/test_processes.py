"""Who lives, who descends from whom, the end of a tree of processes, and one that is nobody's child here."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
from fake_link import supervisor_of
from gaps import gap
from limits import limit_s
from unit_helpers import EXIT_OF_A_THREAD, HANG_S, OURS, eventually, write

from metaflow_extensions.torchrun.plugins.torchrun.machine import processes
from metaflow_extensions.torchrun.plugins.torchrun.task.link import Link

PYTHON = [sys.executable, "-I", "-S"]
# Its main thread ends, and another one goes on until it is told the exit code.
HEADLESS = f"""
import ctypes, os, sys, threading
def go_on():
    print("on", flush=True)
    os._exit(int(sys.stdin.readline()))
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({EXIT_OF_A_THREAD}, 0)
"""


def test_living_descendants_are_all_and_only_the_living():
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([*PYTHON, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert {child.pid, grandchild} <= set(processes.living_descendants(os.getpid()))
        assert processes.living_descendants(child.pid) == [grandchild]
        os.kill(grandchild, signal.SIGKILL)  # a zombie now: its parent does not look
        eventually(lambda: processes.living_descendants(child.pid) == [], "the grandchild's end")
        child.kill()


def test_a_process_lives_while_any_thread_of_it_does():
    with subprocess.Popen([*PYTHON, "-c", HEADLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        eventually(lambda: processes.find(child.pid).state == "Z", "the end of its main thread")
        began = processes.began(child.pid)
        assert processes.find(child.pid).status is None
        assert processes.is_alive(child.pid, began)
        assert child.pid in processes.living_descendants(os.getpid())
        child.stdin.write(b"7\n")
        child.stdin.flush()
        eventually(lambda: not processes.is_alive(child.pid, began), "its end")
        assert processes.find(child.pid).status == 7


# A child that becomes nobody, and ends with the code in its argument.
AS_NOBODY = f"""{OURS}
import os, subprocess, time
from ours.machine import processes
code = f"import os; os.set{{sys.argv[1]}}(65534); os._exit({{sys.argv[2]}})"
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
while (found := processes.find(child.pid)).is_alive:
    time.sleep(0.01)
print(found.status, child.wait())
"""


@pytest.mark.parametrize("who", ["uid", "gid"])
@pytest.mark.parametrize("code", ["0", "7"])
def test_an_exit_code_that_the_kernel_hides_is_not_known(who, code):
    """As in a container, which has no CAP_SYS_PTRACE."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        gap("Only root can become another user, by setpriv.", "Run it as root, with util-linux.")
    without = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-all"]
    words = [*without, sys.executable, "-c", AS_NOBODY, who, code]
    script = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert script.stdout.split() == ["None", code]


def test_await_or_kill_waits_for_those_that_end_and_kills_those_that_do_not():
    quick, slow = subprocess.Popen(["sleep", "0.2"]), subprocess.Popen(["sleep", "600"])
    reapers = [threading.Thread(target=child.wait) for child in (quick, slow)]
    for reaper in reapers:
        reaper.start()
    processes.await_or_kill({quick.pid, slow.pid}, limit_s(1.0))
    for reaper in reapers:
        reaper.join(limit_s(HANG_S))
    assert (quick.returncode, slow.returncode) == (0, -signal.SIGKILL)


# --- beside a task ----------------------------------------------------------------------------------


def test_a_supervisor_is_no_child_and_finds_its_library_by_pythonhome_and_nothing_that_users_have_put_before_it(
    tmp_path, monkeypatch
):
    """As a Python needs that was moved after it was built."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, mark = tmp_path / "home" / sys.platlibdir / version, tmp_path / "mark"
    types = Path(sysconfig.get_path("stdlib"), "types.py")
    write(library / "types.py", f"open({str(mark)!r}, 'w').close()\n{types.read_text(encoding='utf-8')}")
    for each in types.parent.iterdir():
        if each.name not in ("types.py", "__pycache__"):
            (library / each.name).symlink_to(each)
    for folder in ("here", "path"):
        write(tmp_path / folder / "types.py", "raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    link = Link(1.0)
    assert supervisor_of(link) not in {0, *processes.children(os.getpid())}
    link.close()
    assert mark.exists()
