"""Gives names of Metaflow's another ending, in all of Metaflow and in what uses it, as a later version might.

``RENAMED`` has the names. Metaflow itself goes on as ever, and so do other extensions; only our own code finds the
names gone. A test puts this folder on PYTHONPATH. What Python compiles here is never kept.
"""

import os
import re
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

NAMES = os.environ.get("RENAMED", "").split()
PATTERN = re.compile(rb"\b(" + "|".join(map(re.escape, NAMES)).encode() + rb")\b")


class Loader(SourceFileLoader):
    def get_data(self, path):
        data = super().get_data(path)
        return PATTERN.sub(rb"\1_renamed", data) if path.endswith(".py") else data

    def path_stats(self, path):
        raise OSError("no compiled file stands for this source")


class Finder:
    def find_spec(self, name, path=None, target=None):
        top, _, rest = name.partition(".")
        if top not in ("metaflow", "metaflow_extensions") or rest.startswith("torchrun"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if PATTERN.search(Path(spec.origin).read_bytes()):
            spec.loader = Loader(name, spec.origin)
        return spec


if NAMES:
    sys.meta_path.insert(0, Finder())
