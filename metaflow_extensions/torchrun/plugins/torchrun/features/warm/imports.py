"""Records a spare's imports, and checks whether a program that starts now would import the same."""

from __future__ import annotations

import glob
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import PathFinder
from typing import Any

# Prefixes of variables that change what is loaded: those of the interpreter, of libraries, of torch's own modules. They
# are the families of all variables that Python code and getenv(3) read while torch 2.13 (CPU build) was imported.
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "HOME", "OPENSSL_", "SSL_"),
    *("LOGLEVEL", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCHEXPORT_", "FX_", "COMPILE_STROBELIGHT_"),
    *("TORCH_", "PYTORCH_", "C10_", "ATEN_", "KINETO_", "GLOG_", "NPY_", "NUMPY_", "GFORTRAN_", "INTEL_"),
)
# Only workers read these. An agent does not compute; it passes them to its workers.
_READ_TO_COMPUTE = (
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ACC_"),
    *("CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_", "HSA_", "XLA_", "NEURON_", "HABANA_"),
    *("TMPDIR", "TEMP", "TMP", "XDG_", "USE_", "I_MPI_", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
# Packages whose variables have another prefix than their names.
_OTHER_PREFIXES = {"hf": "huggingface_hub", "mplbackend": "matplotlib", "mplconfigdir": "matplotlib"}
# torch reads these when a process group is made (ProcessGroupNCCL.hpp, 2.13).
_READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_")


class StartCold(Exception):
    """The spare can't run this program, so it starts cold; the text is the reason."""


def in_words(error: BaseException) -> str:
    """Return the reason why a spare could not be used."""
    return str(error) if isinstance(error, StartCold) else f"{type(error).__name__}: {error}"


class Imports:
    """The imports of this process, and what they depend on: variables, files, and the search path."""

    def __init__(self, modules: Sequence[str], folder: str, computes: bool) -> None:
        self._folder = folder  # was the first entry of the path
        self._computes = computes
        self._fault = ""  # why no program can run here
        self._env = dict(os.environ)  # before the imports, which may change variables
        try:
            for name in modules:
                with _without(folder) if name == modules[0] else nullcontext():  # torch needs nothing of the user's
                    importlib.import_module(name)
        except BaseException as error:
            self._fault = f"{name} could not be imported: {type(error).__name__}: {error}"
        self._files = dict(_files_of_modules())
        if computes:  # optional packages or ``.pth`` files may be added later; an agent needs neither
            installed = [entry for entry in sys.path if entry.endswith("-packages")]
            self._files.update({entry: known for entry in installed if (known := _version(entry)) is not None})
        self._read_by_site = set(_names_in_pth(sys.path)) if computes else set()
        fixed = {*sys.builtin_module_names, "__main__", "__mp_main__"}  # no file can replace these
        self._modules = {name: module for name, module in sys.modules.items() if "." not in name and name not in fixed}

    def check(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Raise `StartCold` if a program that starts now could import anything else than this process has."""
        if self._fault:
            raise StartCold(self._fault)
        if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
            raise StartCold("PYTHONSAFEPATH is set")
        if argv[:2] != [sys.executable, "-u"] or (argv[2].startswith("-") and argv[2] != "-m"):
            raise StartCold(f"it runs {' '.join(argv[:3])}, not {sys.executable} -u with a script or a module")
        differing = [name for name in {*env, *self._env} if env.get(name) != self._env.get(name) and self.counts(name)]
        if differing:
            raise StartCold(f"{', '.join(sorted(differing))} had another value when torch was imported")
        for file, known in self._files.items():
            if _version(file) != known:
                raise StartCold(f"{file} has changed since it was imported")
        entries = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
        relative = [entry or "an empty entry" for entry in entries if not os.path.isabs(entry)]
        if relative and cwd != self._folder:  # the interpreter has made the entry absolute
            raise StartCold(f"{relative[0]} in PYTHONPATH is relative to another working directory")
        self._check_path(first_entry(argv, cwd))

    def apply(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Set the program's search path and variables; those that the imports have set stay, as after a cold start."""
        sys.path[sys.path.index(self._folder)] = first_entry(argv, cwd)
        for name in self._env.keys() - env.keys():
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in env.items() if value != self._env.get(name)})

    def counts(self, name: str) -> bool:
        """Return whether the value of a variable could have changed what was imported."""
        if os.environ.get(name) != self._env.get(name):  # an import has set it, perhaps from its old value
            return True
        if name in self._read_by_site:
            return True
        if name.startswith(_READ_LATER):
            return False
        families = _READ_AT_START + (_READ_TO_COMPUTE if self._computes else ())
        # A package's own variables start with its name, like those of transformers and tqdm.
        prefix = name.partition("_")[0].lower()
        package = _OTHER_PREFIXES.get(prefix, prefix)
        return name.startswith(families) or (package in self._modules and package not in sys.stdlib_module_names)

    def _check_path(self, folder: str) -> None:
        """Raise `StartCold` if the program's own folder, the first entry of its path, changes which modules are found."""
        own = self._folder
        if folder != own and sys.path.count(own) == 1:
            for name, module in self._modules.items():
                if _folder_of(module) == own:
                    raise StartCold(f"{name} was imported from {own}, which is not on the program's path")
        with suppress(OSError):  # Python finds nothing in a folder that can't be listed
            for name in sorted({entry.partition(".")[0] for entry in os.listdir(folder)} & set(self._modules)):
                spec, file = PathFinder.find_spec(name, [folder]), getattr(self._modules[name], "__file__", None)
                # A folder without ``__init__.py`` has no origin, and is only found after all other modules.
                if spec is not None and spec.origin is not None and spec.origin != file:
                    raise StartCold(f"{spec.origin} would be imported instead of {file or name}")


@contextmanager
def _without(folder: str) -> Iterator[None]:
    """Keep what lies in a folder from being imported for a module of the same name."""
    at = sys.path.index(folder)
    del sys.path[at]
    try:
        yield
    finally:
        sys.path.insert(at, folder)


def first_entry(argv: Sequence[str], cwd: str) -> str:
    """Return the first entry of the path for ``python -u SCRIPT`` or ``python -u -m MODULE``."""
    return cwd if argv[2] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[2])))


def _folder_of(module: Any) -> str | None:
    """Return the folder of the path in which a module or its package was found."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return os.path.dirname(os.path.dirname(file) if hasattr(module, "__path__") else file)


def _files_of_modules() -> Iterator[tuple[str, tuple[int, int]]]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (version := _version(file)) is not None:
            yield file, version


def _names_in_pth(path: Sequence[str]) -> Iterator[str]:
    """Yield the words in ``.pth`` files, since any may name a variable: Python executes their lines when it starts.

    Tracers and tools for coverage begin there, if a variable says so.
    """
    for folder in path:
        for file in glob.glob(os.path.join(glob.escape(folder), "*.pth")):
            with suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith(("import ", "import\t")):
                        yield from re.findall(r"\w+", line)


def _version(file: str) -> tuple[int, int] | None:
    try:
        now = os.stat(file)
    except OSError:  # torch has modules whose `__file__` names no file
        return None
    return now.st_mtime_ns, now.st_size
