"""`check_links`, a function for `run`: checks whether the nodes can work together, and measures their network.

Its stages are the start, connecting the nodes, and the all-reduce. After each stage, every rank writes a report to the
store of torchrun's agent. Rank 0 reads all reports and names the nodes that sent none or that failed.
Every rank imports this module, and Metaflow imports it with every flow. So it imports torch inside its functions only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

Report = dict[str, Any]

# How long the first rank waits for the last: importing torch from a cold disk takes minutes on some nodes.
_ARRIVE_S = 300.0
_OPERATION_S = 60.0
# The limit for a rank's part of a stage. NCCL's own start has no timeout.
_STAGE_S = 600.0
# The kernel repeats a lost SYN after 1, 3 and 7 s.
_CONNECT_S = 10.0
# Other ranks may see a failed operation this much later than rank 0.
_MARGIN_S = 15.0

_LAPS = 5
_BULK_LAPS = 2
_MIB = 1024 * 1024
_ALL_REDUCE_BYTES = {"gloo": 16 * _MIB, "nccl": 64 * _MIB}
_MOST_QUOTED = 3
# What gloo, NCCL and sockets say of a connection.
_OF_THE_NETWORK = re.compile(
    r"connect|timed? ?out|unreachable|refused|reset by peer|broken pipe|no route|socket|remote process exited",
    re.IGNORECASE,
)


class PreflightError(Exception):
    """The nodes can't work together; the message names the faulty ones."""

    torchrun_kind = "preflight"  # of the cause, see `gang.cause`; the workers' hook records it


class DevicesFail(PreflightError):
    """Devices are too few, or something else has failed that is not the network."""

    torchrun_kind = "devices"


class Place(NamedTuple):
    """The position of this worker."""

    rank: int
    local_rank: int
    node: int
    nproc: int
    world: int

    @property
    def nodes(self) -> int:
        """The number of nodes; all have the same number of processes."""
        return self.world // self.nproc


# --- the stages -----------------------------------------------------------------------------------


class Stages:
    """Runs the stages on one rank: do the work, report, wait for rank 0's answer. Every wait is bounded."""

    def __init__(self, store: Any, place: Place) -> None:
        self._store = store
        self._place = place
        self.hosts: Sequence[str] = ()  # of the nodes, if known

    def run(
        self,
        stage: str,
        work: Callable[[], Report],
        judge: Callable[[list[Report]], Report],  # called on rank 0, and only if no report is an error
        wait_s: float,  # how long rank 0 waits for the others after its own part
    ) -> Report:
        """Do this rank's part of a stage and return rank 0's answer, or raise PreflightError."""
        faulthandler.dump_traceback_later(_STAGE_S, exit=True)
        try:
            report = work()
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._store.set(f"{stage}/{self._place.rank}", json.dumps(report))
        if self._place.rank == 0:  # if its own part has failed, the others soon fail, too
            verdict = judge(self._collect(stage, _MARGIN_S if "error" in report else wait_s))
            self._store.set(f"{stage}/answer", json.dumps(verdict))
            return verdict
        answer = self._read(f"{stage}/answer", time.monotonic() + 2 * (wait_s + _MARGIN_S))
        if answer is None:  # rank 0 has ended, perhaps with an error that names the faulty nodes
            raise PreflightError(f"node 0 did not answer after {stage}: its rank 0 is stuck or slow.")
        return answer

    def _collect(self, stage: str, wait_s: float) -> list[Report]:
        """Return the reports of all ranks; raise an error that names silent or failed ones."""
        deadline = time.monotonic() + wait_s
        reports: list[Report] = []
        silent: list[int] = []
        failed: dict[int, str] = {}
        for rank in range(self._place.world):
            node, report = rank // self._place.nproc, self._read(f"{stage}/{rank}", deadline)
            if report is None:
                silent.append(node)
            elif "error" in report:
                failed.setdefault(node, f"rank {rank}: {report['error']}")
            else:
                reports.append(report)
        if silent:
            named = nodes_text(silent, self.hosts)
            raise PreflightError(f"{named} did not take part in {stage}: no message within {wait_s:g} s.")
        if failed:
            quoted = "; ".join(list(failed.values())[:_MOST_QUOTED])
            kind = PreflightError if any(map(_OF_THE_NETWORK.search, failed.values())) else DevicesFail
            raise kind(f"{stage} failed on {nodes_text(failed, self.hosts)}. {quoted}")
        return reports

    def _read(self, key: str, deadline: float) -> Report | None:
        """Return the report under `key`, or None if there is none by the deadline."""
        # The class of a timeout depends on torch's version. If the store is gone, the next call raises.
        with suppress(Exception):
            self._store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        if not self._store.check([key]):
            return None
        read: Report = json.loads(self._store.get(key))
        return read


def nodes_text(nodes: Iterable[int], hosts: Sequence[str] = ()) -> str:
    """Return the names of nodes, each once and in order, with their hosts if known."""
    named = [f"{node} (host {hosts[node]})" if hosts else str(node) for node in sorted(set(nodes))]
    return ("node " if len(named) == 1 else "nodes ") + ", ".join(named)


# --- devices and connections ----------------------------------------------------------------------


def own_address(main_addr: str) -> str:
    """Return this node's own address on the route to the control node, without sending anything."""
    family, kind, _, _, target = socket.getaddrinfo(main_addr, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen(address: str) -> socket.socket:
    """Return a listening socket; the kernel completes connections without `accept`."""
    local = address == "::1" or address.startswith("127.")  # as on a local run; then only this address listens
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address if local else "", 0), family=family)


def choose_backend(reports: Sequence[Report], nproc: int) -> str:
    """Return nccl if every worker has its own CUDA device, gloo if no node has enough; raise if the nodes differ."""
    firsts = reports[::nproc]
    without = {rank // nproc for rank, report in enumerate(reports) if not report["cuda"]}
    if not without:
        return "nccl"
    if len(without) == len(firsts):
        return "gloo"
    hosts = [report["host"] for report in firsts]
    counts = ", ".join(f"node {node}: {report['devices']}" for node, report in enumerate(firsts))
    raise DevicesFail(
        f"{nodes_text(without, hosts)} have fewer CUDA devices than workers, or torch can't use them, but others have "
        f"enough (devices that torch sees: {counts}; workers on each: {nproc}). Look at the driver and the devices there."
    )


def connect_to(address: tuple[str, int], timeout_s: float) -> str | None:
    """Return why `address` can't be reached, or None."""
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return None


def judge_connections(reports: Sequence[Report], nproc: int, hosts: Sequence[str]) -> Report:
    """Return an empty answer if every node reaches the next, else raise."""
    firsts = reports[::nproc]
    failed = [(node, (node + 1) % len(firsts), report["why"]) for node, report in enumerate(firsts) if report["why"]]
    if not failed:
        return {}
    ends = [end for way in failed for end in way[:2]]
    # With three or more nodes, a node with two failed connections is the faulty one.
    guilty = [node for node in ends if ends.count(node) > 1 and len(firsts) > 2]
    ways = "; ".join(f"node {one} to node {other}: {why}" for one, other, why in failed)
    raise PreflightError(
        f"{nodes_text(guilty or ends, hosts)} can't be reached from a neighbour, or can't reach it, on a port "
        f"that the kernel chose ({ways}). gloo and NCCL need such ports: open all TCP ports between the nodes."
    )


# --- measuring ------------------------------------------------------------------------------------


def all_reduce(place: Place, backend: str, store: Any) -> tuple[float, float]:
    """Measure an all-reduce over all ranks; return its latency in seconds and its bandwidth in bytes per second.

    The ranks meet at `store`. They use gloo on CPUs or NCCL on CUDA devices.
    """
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        # A call that waits too long then raises here. Otherwise NCCL's thread would end the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world, timeout=timedelta(seconds=_OPERATION_S)
    )

    def reduce(tensor: Any) -> None:
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()

    size = _ALL_REDUCE_BYTES[backend]
    device = f"cuda:{place.local_rank}" if backend == "nccl" else "cpu"
    small, large = (torch.zeros(count, dtype=torch.float32, device=device) for count in (1, size // 4))
    return median_s(reduce, small, _LAPS), size / median_s(reduce, large, _BULK_LAPS)


def median_s(operation: Callable[[Any], None], tensor: Any, laps: int) -> float:
    """Return the median time of `operation`, in seconds."""
    operation(tensor)  # the first call connects, allocates, and opens TCP's window
    times = []
    for _ in range(laps):
        begun = time.perf_counter()
        operation(tensor)
        times.append(time.perf_counter() - begun)
    return sorted(times)[laps // 2]


# --- the function ---------------------------------------------------------------------------------


def check_links() -> None:
    """Check whether all nodes reach each other, and measure an all-reduce over all ranks.

    Launch it on all nodes, as in ``current.torch.run(check_links)``. Each node logs one line with its figures. If
    nodes are too late, can't reach each other or have too few devices, the launch fails, and the error names them.

    Raises
    ------
    PreflightError
        In the worker, if the nodes can't work together; `run` raises LaunchFailed.
    """
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    place = Place(*(int(os.environ[name]) for name in names))
    if place.world == 1:
        _show("preflight: one process in all, so there is nothing to measure")
        return
    import torch
    from torch.distributed import PrefixStore, TCPStore, is_nccl_available

    main_addr, main_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(main_addr, main_port, is_master=False, timeout=timedelta(seconds=_OPERATION_S))
    stages = Stages(PrefixStore("preflight", store), place)
    own = own_address(main_addr)
    with listen(own) as listener:
        here = (own, listener.getsockname()[1])
        plan = _start(stages, place, here, torch.cuda.device_count() if is_nccl_available() else 0)
        stages.hosts = plan["hosts"]
        if place.nodes > 1:
            _connect(stages, place, main_addr, plan)
    _measure(stages, place, plan, PrefixStore("group", store))


def _start(stages: Stages, place: Place, here: tuple[str, int], devices: int) -> Report:
    """Wait for all ranks; return the backend, and the host and address of each node."""

    def judge(reports: list[Report]) -> Report:
        firsts = reports[:: place.nproc]
        hosts, addresses = [each["host"] for each in firsts], [each["here"] for each in firsts]
        return {"backend": choose_backend(reports, place.nproc), "hosts": hosts, "addresses": addresses}

    own = {"host": socket.gethostname(), "here": here, "devices": devices, "cuda": devices >= place.nproc}
    return stages.run("the start", lambda: own, judge, _ARRIVE_S)


def _connect(stages: Stages, place: Place, main_addr: str, plan: Report) -> None:
    """Check that this node reaches the next one on a port chosen by the kernel."""

    def work() -> Report:
        following = (place.node + 1) % place.nodes
        address, port = plan["addresses"][following]
        # This node has already reached the control node at `main_addr`; the node's other addresses may be unreachable.
        target = (main_addr if following == 0 else address, port)
        return {"why": connect_to(target, _CONNECT_S) if place.local_rank == 0 else None}

    def judge(reports: list[Report]) -> Report:
        return judge_connections(reports, place.nproc, plan["hosts"])

    stages.run("connecting the nodes", work, judge, _CONNECT_S + _MARGIN_S)


def _measure(stages: Stages, place: Place, plan: Report, store: Any) -> None:
    """Measure the all-reduce, and print the figures of this node."""
    import torch.distributed as dist

    measured = []

    def work() -> Report:
        measured.append(all_reduce(place, plan["backend"], store))
        return {}

    stages.run("the all-reduce", work, lambda reports: {}, _OPERATION_S + _MARGIN_S)
    if place.local_rank == 0:
        _show(summary(place, plan["hosts"][place.node], *measured[0]))
    dist.destroy_process_group()  # all ranks have finished the all-reduce


def summary(place: Place, host: str, latency_s: float, bytes_per_s: float) -> str:
    """Return the line with a node's measurements."""
    # The factor of nccl-tests (doc/PERFORMANCE.md) is the share that each rank must send and receive. So the figure is
    # comparable with the hardware's bandwidth for any number of ranks.
    rate = bytes_per_s / 1e9
    bus = rate * 2 * (place.world - 1) / place.world
    who = f"preflight: node {place.node} (host {host}): all-reduce over {place.world} ranks"
    return f"{who}: {latency_s * 1e3:.3f} ms, {rate:.2f} GB/s (bus {bus:.2f} GB/s)"


def _show(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - in a worker
