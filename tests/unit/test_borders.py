"""What is left when a private name of torch, CPython or Linux is gone; of Metaflow's, see ``test_renamed.py``."""

import subprocess
import sys
from pathlib import Path

import pytest

from metaflow_extensions.torchrun.plugins import torchrun as package

FOLDER = Path(package.__file__).parent
NO_CTYPES = "import sys; sys.modules['ctypes'] = None\n"
NO_PRCTL = """\
import ctypes
class Library:
    def __init__(self, name): pass
ctypes.CDLL = Library
"""


def run_code(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("gone", [NO_CTYPES, NO_PRCTL])
def test_without_prctl_all_else_goes_on(gone):
    path = str(FOLDER / "compat" / "linux.py")
    code = f"from importlib.util import *\nspec = spec_from_file_location('linux', {path!r})\n"
    code += "linux = module_from_spec(spec)\nspec.loader.exec_module(linux)\n"
    code += "print(linux.adopt_orphans())"
    assert run_code(gone + code) == ["False"]


def test_linux_is_asked():
    code = "from metaflow_extensions.torchrun.plugins.torchrun.compat import linux\n"
    code += "print(linux.adopt_orphans())"
    assert run_code(code) == ["True"]
