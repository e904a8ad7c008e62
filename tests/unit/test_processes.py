"""Who lives, who descends from whom, the end of a tree of processes, and one that is nobody's child here."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from fake_link import supervisor_of
from unit_helpers import EXIT_OF_A_THREAD, eventually, is_running, write

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
        eventually(lambda: processes.status(child.pid)["State"][0] == "Z", "the end of its main thread")
        began = processes.began(child.pid)
        assert processes.find(child.pid).status is None
        assert processes.is_alive(child.pid, began)
        assert child.pid in processes.living_descendants(os.getpid())
        child.stdin.write(b"7\n")
        child.stdin.flush()
        eventually(lambda: not processes.is_alive(child.pid, began), "its end")
        assert processes.find(child.pid).status == 7


def test_what_is_killed_is_gone_with_all_below_it():
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
    child = subprocess.Popen([*PYTHON, "-c", script])
    (grandchild,) = eventually(lambda: processes.living_descendants(child.pid))
    processes.kill([child.pid])
    assert not is_running(grandchild)
    assert child.wait() == -signal.SIGKILL


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
