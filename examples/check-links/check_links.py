"""Checks whether the nodes of a job reach each other, and measures their links. Runs on every rank, under torchrun.

In each stage every rank leaves a report in torchrun's store; rank 0 reads them all and names nodes that are missing.
"""

import faulthandler
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANK, LOCAL_RANK, NODE, NPROC, WORLD = (
    int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
)
NODES = WORLD // NPROC
NEXT, PREVIOUS = (NODE + 1) % NODES, (NODE - 1) % NODES

ARRIVE_S = 300.0  # ranks may start this far apart: importing torch from a cold disk takes minutes
CONNECT_S = 10.0  # the kernel repeats a lost SYN after 1, 3 and 7 s
OPERATION_S = 60.0
MARGIN_S = 15.0  # other ranks may see a failed operation this much later
STUCK_S = 4 * OPERATION_S
BULK_BYTES = {"gloo": 16 * 2**20, "nccl": 64 * 2**20}
LAPS = 5
SLOW = 0.5  # of the median

MAIN_ADDR = os.environ["MASTER_ADDR"]
STORE = dist.PrefixStore(
    f"check_links/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}",
    dist.TCPStore(MAIN_ADDR, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=OPERATION_S)),
)
HOSTS: list[str] = []  # of the nodes, once they are known


class CheckFailed(Exception):
    """The nodes can't work together; the message names the faulty ones."""


def named(nodes: Iterable[int]) -> str:
    """Return the names of nodes, each once and in order."""
    names = [f"{node} (host {HOSTS[node]})" if HOSTS else str(node) for node in sorted(set(nodes))]
    return ("node " if len(names) == 1 else "nodes ") + ", ".join(names)


def share(stage: str, work: Callable[[], dict[str, Any]], wait_s: float) -> list[dict[str, Any]]:
    """Do this rank's part of a stage, and return what the first rank of each node has found."""
    try:
        report = work()
    except Exception as error:
        report = {"error": f"rank {RANK}: {type(error).__name__}: {error}"}
    STORE.set(f"{stage}/{RANK}", json.dumps(report))
    if RANK == 0:  # if its own part has failed, the others soon fail, too
        STORE.set(f"{stage}/all", json.dumps(collect(stage, MARGIN_S if "error" in report else wait_s)))
    found = read(f"{stage}/all", time.monotonic() + 2 * (wait_s + MARGIN_S))
    if isinstance(found, list):
        return found
    raise CheckFailed(found or f"node 0 did not answer after {stage}: its rank 0 is stuck or slow")


def collect(stage: str, wait_s: float) -> list[dict[str, Any]] | str:
    """Return the reports of the first ranks, or what is wrong: the nodes that are silent or have failed."""
    deadline = time.monotonic() + wait_s
    reports = [read(f"{stage}/{rank}", deadline) for rank in range(WORLD)]
    if silent := [rank // NPROC for rank, report in enumerate(reports) if report is None]:
        return f"{named(silent)} did not take part in {stage}: no message within {wait_s:g} s"
    if failed := {rank // NPROC: report["error"] for rank, report in enumerate(reports) if "error" in report}:
        return f"{stage} failed on {named(failed)}. {'; '.join([*failed.values()][:3])}"
    return reports[::NPROC]


def read(key: str, deadline: float) -> Any:
    """Return what the store has under `key` by the deadline, or None."""
    with suppress(Exception):  # which class a timeout has depends on torch's version
        STORE.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
    return json.loads(STORE.get(key)) if STORE.check([key]) else None


def own_address() -> str:
    """Return this node's address on the route to node 0, without sending anything."""
    family, kind, _, _, target = socket.getaddrinfo(MAIN_ADDR, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen(address: str) -> socket.socket:
    """Return a listening socket; the kernel completes connections without `accept`."""
    is_local = address == "::1" or address.startswith("127.")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address if is_local else "", 0), family=family)


def connect(node: dict[str, Any]) -> dict[str, Any]:
    """Try to connect to the next node, on a port that its kernel chose."""
    if LOCAL_RANK == 0:
        try:  # node 0 has proved reachable at this address; its others may not be
            address = MAIN_ADDR if NEXT == 0 else node["address"]
            socket.create_connection((address, node["port"]), timeout=CONNECT_S).close()
        except OSError as error:
            return {"why": str(error) or type(error).__name__}
    return {"why": None}


def judge_connections(found: list[dict[str, Any]]) -> None:
    failed = [(node, (node + 1) % NODES, report["why"]) for node, report in enumerate(found) if report["why"]]
    if failed:
        ends = [end for link in failed for end in link[:2]]
        # With three or more nodes, a node with two broken links is the faulty one.
        guilty = [node for node in ends if ends.count(node) > 1 and NODES > 2]
        ways = "; ".join(f"node {one} to node {other}: {why}" for one, other, why in failed)
        raise CheckFailed(
            f"{named(guilty or ends)} can't be reached from a neighbour, or can't reach it ({ways}). "
            "gloo and NCCL need ports that the kernel chooses: open all TCP ports between the nodes"
        )


def choose_backend(devices: list[int]) -> str:
    """Return nccl if each process has a GPU, gloo if no node has enough."""
    without = [node for node, count in enumerate(devices) if count < NPROC]
    if 0 < len(without) < NODES:
        raise CheckFailed(f"{named(without)} can use fewer GPUs than processes, others enough: {devices} for {NPROC}")
    return "gloo" if without else "nccl"


def measure(backend: str) -> dict[str, Any]:
    """Return the seconds of a small all-reduce, a large one, and a message from the previous node."""
    faulthandler.dump_traceback_later(STUCK_S, exit=True)  # NCCL's start has no timeout
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a call that waits too long raises here
        torch.cuda.set_device(LOCAL_RANK)
    group, timeout = dist.PrefixStore("group", STORE), timedelta(seconds=OPERATION_S)
    dist.init_process_group(backend, store=group, rank=RANK, world_size=WORLD, timeout=timeout)
    device = f"cuda:{LOCAL_RANK}" if backend == "nccl" else "cpu"
    small, bulk = torch.zeros(1, device=device), torch.zeros(BULK_BYTES[backend] // 4, device=device)
    found = {"small_s": median_s(dist.all_reduce, small), "bulk_s": median_s(dist.all_reduce, bulk), "link_s": None}
    if LOCAL_RANK == 0 and NODES > 1:
        for turn in range(3):  # in each turn, a node uses one link only
            if turn_of(NODE) == turn:
                median_s(lambda tensor: dist.send(tensor, NEXT * NPROC), bulk)
            elif turn_of(PREVIOUS) == turn:
                found["link_s"] = median_s(lambda tensor: dist.recv(tensor, PREVIOUS * NPROC), bulk)
    faulthandler.cancel_dump_traceback_later()
    return found


def turn_of(node: int) -> int:
    """Return when the link from this node to the next one is measured; neighbouring links differ."""
    return 2 if NODES % 2 and node == NODES - 1 else node % 2


def median_s(operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    times = []
    for _ in range(LAPS + 1):
        begun = time.perf_counter()
        operation(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])  # the first one connects, allocates, and opens TCP's window


def show(backend: str, found: list[dict[str, Any]]) -> None:
    size = BULK_BYTES[backend] / 1e9
    rate = size / found[0]["bulk_s"]
    bus = rate * 2 * (WORLD - 1) / WORLD  # as in nccl-tests, to compare with the hardware's bandwidth
    print(f"all-reduce over {WORLD} ranks: {found[0]['small_s'] * 1e3:.3f} ms, {rate:.2f} GB/s (bus {bus:.2f} GB/s)")
    links = [size / found[(node + 1) % NODES]["link_s"] for node in range(NODES)] if NODES > 1 else []
    for node, rate in enumerate(links):
        slow = f", SLOW: the median is {usual:.2f}" if rate < SLOW * (usual := statistics.median_high(links)) else ""
        print(f"{named([node])} to {named([(node + 1) % NODES])}: {rate:.2f} GB/s over {backend}{slow}")


def main() -> None:
    own = own_address()
    with listen(own) as listener:
        here = {"host": socket.gethostname(), "address": own, "port": listener.getsockname()[1]}
        devices = torch.cuda.device_count() if dist.is_nccl_available() else 0
        nodes = share("the start", lambda: {**here, "devices": devices}, ARRIVE_S)
        HOSTS[:] = [node["host"] for node in nodes]
        judge_connections(share("connecting", lambda: connect(nodes[NEXT]), CONNECT_S + MARGIN_S))
    backend = choose_backend([node["devices"] for node in nodes])
    found = share("measuring", lambda: measure(backend), OPERATION_S + MARGIN_S)
    if RANK == 0:
        show(backend, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
