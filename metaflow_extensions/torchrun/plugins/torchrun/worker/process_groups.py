"""Records a worker's process groups, and from the first one on lets it be asked which collectives it has called.

``worker_hooks/sitecustomize.py`` runs this file, without our package on its path. Torch's flight recorders keep the last
2 000 collectives; torch's server answers from threads of its own, without the GIL. ``supervisor/recorders.py`` asks.
"""

import atexit
import ctypes
import json
import os
import time
from contextlib import suppress
from typing import Any

FILE, SOCKET = "process-groups.jsonl", "recorders"
_LAST_S = 0.2


class Groups(dict[Any, Any]):
    """Takes the place of torch's dict of groups and their ranks, and writes down each group of this worker."""

    def __init__(self, c10d: Any, folder: str) -> None:
        self._c10d, self._folder, self._pid = c10d, folder, os.getpid()

    def __setitem__(self, group: Any, ranks: Any) -> None:
        super().__setitem__(group, ranks)
        with suppress(Exception):  # another torch, a full disk: then less is known in a hang
            name = self._c10d._pg_names.get(group)
            # Not what a fork of the worker makes, and only ranks that are those of torchrun.
            if name is None or os.getpid() != self._pid or ranks.get(int(os.environ["RANK"])) != group.rank():
                return
            with open(os.path.join(self._folder, FILE), "a", encoding="ascii") as file:
                file.write(json.dumps({"name": name, "desc": group.group_desc, "ranks": list(ranks)}) + "\n")
            if not os.path.lexists(os.path.join(self._folder, SOCKET)):
                _serve(self._folder)


def watch(c10d: Any, folder: str) -> None:
    """Have the groups recorded that ``torch.distributed.distributed_c10d`` makes (its private names: torch 2.13).

    Not by a function around its own: that would add a frame to tracebacks.
    """
    if type(c10d._pg_group_ranks) is dict and not c10d._pg_group_ranks:
        c10d._pg_group_ranks = Groups(c10d, folder)


def _serve(folder: str) -> None:
    """Start torch's server; it lives as long as the process (torch 2.13, control_plane/WorkerServer.cpp)."""
    import torch
    from torch._C._distributed_c10d import _get_handler_names, _WorkerServer  # type: ignore[attr-defined]

    if not {"fr_trace_json", "dump_nccl_trace_json"} & set(_get_handler_names()):
        return
    # It logs a line at its start, and more if it is freed, so it never is.
    level = ctypes.c_int()
    with suppress(OSError, ValueError):  # a torch that was built with another logger
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    parent, before = os.open(folder, os.O_PATH | os.O_CLOEXEC), level.value
    try:
        level.value = 2  # errors
        server = _WorkerServer(f"/proc/self/fd/{parent}/{SOCKET}")  # a socket's path has 107 bytes at most
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    finally:
        level.value = before
        os.close(parent)
    with suppress(ImportError):
        from torch._C._distributed_c10d import _register_handler

        _register_handler("torchrun_profile", _profile)


def _profile(request: Any, response: Any) -> None:
    """Answer with what torch's own handler makes (torch 2.13 and 2.14); imported only now, with torch's profiler."""
    try:
        import torch
        from torch.distributed.debug import _handlers

        if torch.autograd.profiler._is_profiler_enabled:  # torch 2.13: two at a time crash
            raise RuntimeError("the script itself uses torch.profiler now")
        _handlers._torch_profile(request, response)
        # Torch's profiler keeps the group alive. Then gloo's thread may still hold the last collective's tensors at the
        # interpreter's end, and abort the process (torch 2.13). It lets go of them in a moment.
        atexit.register(time.sleep, _LAST_S)
    except Exception as error:
        response.set_status(501)
        response.set_content(f"{type(error).__name__}: {error}".encode(), "text/plain")
