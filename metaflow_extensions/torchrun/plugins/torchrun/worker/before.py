"""Has a spare begin as a program that starts now; refuses if that would find other variables or packages."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import all_suffixes
from pathlib import Path

from .spare_process import StartCold

# Stands in a spare's path for the folder of its program, so that its imports find nothing there.
PROGRAM_FOLDER = "<the folder of the program>"
# Beginnings of names. We and torchrun set these for a launch (torch 2.13: `_start_workers` in elastic/agent/server/
# local_elastic_agent.py), and NCCL, gloo and torch read theirs when a process group is made: no import reads any.
_OF_LAUNCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCHRUN_", "METAFLOW_TORCHRUN_"),
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_"),
)
# All that Python, ``.pth`` files and torch read at their start (2.13, CPU build), and what GPUs add to that.
READ_AT_START = (
    *("PY", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "HOME", "TMP", "TEMP", "XDG_", "USE_", "COV", "LOGLEVEL"),
    *("TORCH", "FX_", "COMPILE_", "C10_", "ATEN_", "KINETO_", "GLOG_", "NPY_", "NUM", "GFORTRAN_", "INTEL_", "ACC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPEN", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "I_MPI_", "MPI_", "OMPI_", "SSL_"),
    *("CU", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "XLA_", "NEURON_", "HABANA_"),
)
_IMPORTABLE = (*all_suffixes(), ".pth", ".dist-info")


class Before:
    """The variables and the search path of this process before its imports."""

    def __init__(self, allows_new: bool) -> None:
        self._allows_new = allows_new  # variables: no list can name those that a user's modules read
        self._env = dict(os.environ)
        # Python runs the code in ``.pth`` files when it starts: tracers begin there, if a variable says so.
        files = (file for entry in sys.path for file in glob.glob(os.path.join(glob.escape(entry), "*.pth")))
        self._run_at_start = "".join(Path(file).read_text("utf-8", "replace") for file in files)
        self._found = {entry: _importable(entry) for entry in sys.path[1:]}

    def begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Set a program's search path and variables, or raise `StartCold` if it could begin in another way."""
        if argv[:2] != [sys.executable, "-u"] or (argv[2].startswith("-") and argv[2] != "-m"):
            raise StartCold(f"it runs {' '.join(argv[:3])}, not {sys.executable} -u with a script or a module")
        if "PYTHONSAFEPATH" in env:
            raise StartCold("PYTHONSAFEPATH is set")
        changed = {name for name in {*env, *self._env} if env.get(name) != self._env.get(name)}
        if names := sorted(filter(self.counts, changed)):
            raise StartCold(f"{', '.join(names)} had another value when torch was imported")
        if not os.path.samefile(cwd, os.curdir):
            raise StartCold(f"the working directory was {os.getcwd()} when torch was imported")
        for entry, found in self._found.items():  # of the same variables and folder comes the same path
            if new := found ^ _importable(entry):
                raise StartCold(f"{os.path.join(entry, min(new))} came or went since torch was imported")
        imported = sys.modules.keys() - {*sys.builtin_module_names, "__main__", "__mp_main__"}
        folder = os.getcwd() if argv[2] == "-m" else os.path.dirname(os.path.realpath(argv[2]))
        for name in sorted(_importable(folder)):
            if name.partition(".")[0] in imported:
                raise StartCold(f"{os.path.join(folder, name)} has the name of a module that is imported already")
        sys.path[sys.path.index(PROGRAM_FOLDER)] = folder
        for name in self._env.keys() - env.keys():
            os.environ.pop(name, None)
        # What imports have set stays, as after a cold start.
        os.environ.update({name: env[name] for name in changed & env.keys()})

    def counts(self, name: str) -> bool:
        """Return whether another value of a variable could have changed what was imported."""
        if name.startswith(_OF_LAUNCH):
            return False
        if name in self._env or name in os.environ or not self._allows_new or name in self._run_at_start:
            return True
        return name.startswith(READ_AT_START)


def _importable(folder: str) -> set[str]:
    """Return the names in a folder of what can be imported; its time of change would tell of other files, too."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    packages = {name for name in names if os.path.exists(os.path.join(folder, name, "__init__.py"))}
    return packages | {name for name in names if name.endswith(_IMPORTABLE)}
