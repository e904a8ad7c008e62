"""Asks this node's workers which collectives they have called.

Torch's server in each has one of torch's flight recorders for CPUs and one for NCCL.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..gang.collectives import Calls, reduced
from ..machine import processes
from ..machine.aside import Aside
from ..machine.cgroup import own_folders
from .torch_server import request
from .workers import Workers, worker_folder

FILE = "process-groups.jsonl"  # also in `worker/process_groups`
# Torch's own page asks NCCL's for what is active (torch/distributed/debug/_debug_handlers.py, 2.13). But what a rank
# that waits for nothing has called last stands in the others alone: `pg_status` has numbers that name no group.
_HANDLERS = {"gloo": "fr_trace_json", "nccl": "dump_nccl_trace_json"}
_RANK_S, _NODE_S = 2.0, 4.0
_MAX_BYTES = 4 * 1024 * 1024  # of an answer; 2 000 entries are about 1 MB
_ROOM = 4  # so many times as many threads must be free as the servers start
_DISK = Aside("torchrun-recorders")


def environment(nproc: int) -> dict[str, str]:
    """Return the variable that lets workers start torch's server if cgroups and the user's limit leave room for its threads.

    It has one for each CPU, and ends the process if one can't start (httplib in torch 2.13).
    """
    limits = (
        [processes.read(f"{at}/pids.{each}").strip() for each in ("max", "current")] for at in own_folders("pids")
    )
    free = min((int(most) - int(now) for most, now in limits if most.isdigit() and now.isdigit()), default=math.inf)
    own_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if own_limit != resource.RLIM_INFINITY:  # of all threads of the user; the machine has at least as many
        threads_now = processes.read("/proc/loadavg").partition("/")[2].partition(" ")[0]
        free = min(free, own_limit - int(threads_now)) if threads_now else 0
    threads = nproc * (max(8, os.sysconf("SC_NPROCESSORS_ONLN")) + 1)
    return {"TORCHRUN_RECORDERS": "1" if free >= _ROOM * threads else "0"}


async def ask(workers: Workers) -> tuple[list[Calls], dict[int, str]]:
    """Return what this node's workers have called, and why others have told nothing; never raises for what they do."""
    silent, running = dict.fromkeys(workers.codes, "had ended"), workers.running()
    local = {workers.call.global_rank(rank): rank for rank in range(workers.call.nproc)}
    try:
        asked = {rank: local[rank] for rank in running}
        calls, late = await _DISK.within(_NODE_S, lambda: asyncio.run(_ask_all(workers.folder, asked)))
    except (OSError, LookupError, TypeError, ValueError):  # a disk that hangs, answers of another torch
        return [], silent
    for rank in late:
        with suppress(OSError, KeyError):
            silent[rank] = f"did not answer; process state {processes.status(running[rank])['State']}"
    return calls, silent


async def _ask_all(log_dir: str, ranks: Mapping[int, int]) -> tuple[list[Calls], list[int]]:
    """Return what these ranks' recorders have told, and which ranks did not answer in time."""
    told = await asyncio.gather(*(_told(worker_folder(log_dir, local_rank)) for local_rank in ranks.values()))
    of_ranks = dict(zip(ranks, told, strict=True))
    dumps = {rank: each for rank, (each, _) in of_ranks.items() if each}
    calls = reduced(dumps, {rank: groups for rank, (_, groups) in of_ranks.items()})
    return calls, [rank for rank, (each, _) in of_ranks.items() if each is None]


async def _told(folder: str) -> tuple[dict[str, Any] | None, list[Any]]:
    groups: list[Any] = []
    try:
        with open(os.path.join(folder, FILE), encoding="ascii") as file:
            groups = [json.loads(line) for line in file if line.endswith("\n")]
        dumps = await asyncio.wait_for(asyncio.gather(*(_dump(folder, each) for each in _HANDLERS.values())), _RANK_S)
        return {name: dump for name, dump in zip(_HANDLERS, dumps, strict=True) if dump is not None}, groups
    except asyncio.TimeoutError:  # no OSError before Python 3.11
        return None, groups
    except (OSError, ValueError, EOFError):  # no group yet, or no server: another torch, or no room for its threads
        return {}, groups


async def _dump(folder: str, handler: str) -> Any:
    """Return what a recorder holds; None where there is none, or too much."""
    async with request(folder, handler) as (status, body):
        try:
            await body.readexactly(_MAX_BYTES)
        except asyncio.IncompleteReadError as all_of_it:
            return json.loads(all_of_it.partial) if status == 200 else None
    return None
