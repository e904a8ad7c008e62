"""Finds out whether the nodes can work together and how fast their network is: the script of ``preflight=True``.

torchrun runs it on every rank before the user's script. Its stages are the start, connecting the nodes, and the
all-reduce; with the argument ``links`` it measures the links before that. After each stage rank 0 hears from all ranks,
over the store of torchrun's agent, and names the nodes that are silent or report a failure.
It stands alone: it imports nothing of this package, and nothing imports it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

Report = dict[str, Any]

# How long the first rank waits for the last: importing torch from a cold disk takes minutes on some nodes.
_ARRIVE_S = 300.0
_OPERATION_S = 60.0
# What a rank's part of a stage may take. NCCL's own start knows no timeout.
_STAGE_S = 600.0
# A SYN that is lost is sent again after 1, 3 and 7 s.
_CONNECT_S = 10.0
# What others need beyond rank 0 to see that an operation failed.
_MARGIN_S = 15.0

_LAPS = 5
_BULK_LAPS = 2
_MIB = 1024 * 1024
_ALL_REDUCE_BYTES = {"gloo": 16 * _MIB, "nccl": 64 * _MIB}
_LINK_BYTES = {"gloo": 4 * _MIB, "nccl": 64 * _MIB}

# How far a node's best link may be from that of the median node. Below a millisecond, a scheduler alone can make the
# difference.
_TIMES_SLOWER = 3.0
_LATENCY_FLOOR_S = 1e-3
_MOST_QUOTED = 3


class PreflightError(Exception):
    """The nodes can't work together; the message names those at fault."""


class Place(NamedTuple):
    """Which worker this is."""

    rank: int
    local_rank: int
    node: int
    nproc: int
    world: int

    @property
    def nodes(self) -> int:
        """Nodes of the gang; torchrun's are of one width here."""
        return self.world // self.nproc

    @property
    def next_node(self) -> int:
        """The node behind this one, in a ring."""
        return (self.node + 1) % self.nodes


class Figures(NamedTuple):
    """What was measured of a link or a collective."""

    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{_short(self.latency_s * 1e3)} ms, {_short(self.bytes_per_s / 1e9)} GB/s"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


# --- the stages -----------------------------------------------------------------------------------


class Stages:
    """Takes a rank through the stages: it does its part, reports, and gets rank 0's answer. Every wait is bounded."""

    def __init__(self, store: Any, place: Place) -> None:
        self._store = store
        self._place = place
        self.hosts: Sequence[str] = ()  # of the nodes, once they are known

    def run(
        self,
        stage: str,
        work: Callable[[], Report],
        judge: Callable[[list[Report]], Report],  # rank 0's; no report that it takes is an error
        wait_s: float,  # how long rank 0 waits for the others when its own part is done
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
        if self._place.rank == 0:  # where its own part has failed, the others' soon will
            answer = judge(self._collect(stage, _MARGIN_S if "error" in report else wait_s))
            self._store.set(f"{stage}/answer", json.dumps(answer))
            return answer
        said = self._read(f"{stage}/answer", time.monotonic() + 2 * (wait_s + _MARGIN_S))
        if said is None:  # rank 0 is alone to know who is at fault, unless it is itself
            raise PreflightError(f"node 0 did not answer after {stage}: its rank 0 is stuck or slow.")
        return said

    def _collect(self, stage: str, wait_s: float) -> list[Report]:
        """Return the reports of all ranks, or raise for those that are silent or have failed."""
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
            raise PreflightError(f"{named} did not take part in {stage}: no word within {wait_s:g} s.")
        if failed:
            quoted = "; ".join(list(failed.values())[:_MOST_QUOTED])
            raise PreflightError(f"{stage} failed on {nodes_text(failed, self.hosts)}. {quoted}")
        return reports

    def _read(self, key: str, deadline: float) -> Report | None:
        """Return what stands under `key`, or None if nothing does by then."""
        with suppress(Exception):  # a timeout has another class in every torch; a store that is gone fails in get
            self._store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        if not self._store.check([key]):
            return None
        read: Report = json.loads(self._store.get(key))
        return read


def nodes_text(nodes: Iterable[int], hosts: Sequence[str] = ()) -> str:
    """Name nodes, each once and in order, with their hosts where these are known."""
    named = [f"{node} (host {hosts[node]})" if hosts else str(node) for node in sorted(set(nodes))]
    return ("node " if len(named) == 1 else "nodes ") + ", ".join(named)


# --- devices and connections ----------------------------------------------------------------------


def own_address(main_addr: str) -> str:
    """Return the address with which this node goes to the control node; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(main_addr, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen(address: str) -> socket.socket:
    """Return a socket that takes connections, which the kernel completes without us."""
    local = address == "::1" or address.startswith("127.")  # as on a local run; then it takes them there only
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address if local else "", 0), family=family)


def choose_backend(reports: Sequence[Report], nproc: int) -> str:
    """Return nccl if every worker has a CUDA device of its own, gloo if none has; raise if the nodes differ."""
    firsts = reports[::nproc]
    without = {rank // nproc for rank, report in enumerate(reports) if not report["cuda"]}
    if not without:
        return "nccl"
    if len(without) == len(firsts):
        return "gloo"
    hosts = [report["host"] for report in firsts]
    counts = ", ".join(f"node {node}: {report['devices']}" for node, report in enumerate(firsts))
    raise PreflightError(
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
    # Of three or more nodes, those that two ways fail at are to blame.
    guilty = [node for node in ends if ends.count(node) > 1 and len(firsts) > 2]
    ways = "; ".join(f"node {one} to node {other}: {why}" for one, other, why in failed)
    raise PreflightError(
        f"{nodes_text(guilty or ends, hosts)} can't be reached from a neighbour, or can't reach it, on a port "
        f"that the kernel chose ({ways}). gloo and NCCL need such ports: open all TCP ports between the nodes."
    )


# --- measuring ------------------------------------------------------------------------------------


def ring_phases(nodes: int) -> list[list[int]]:
    """Return which links are measured at the same time; link i is between node i and the next.

    No node is in two links of one phase, and there are three phases at most, whatever the gang's size:
    the even links, the odd ones, and the last link of an odd ring, which meets the first at node 0.
    """
    if nodes <= 2:
        return [[0]] if nodes == 2 else []
    phases = [list(range(0, nodes - nodes % 2, 2)), list(range(1, nodes, 2))]
    return [*phases, [nodes - 1]] if nodes % 2 else phases


def slow_nodes(links: Mapping[int, Sequence[Figures]], hosts: Sequence[str]) -> list[str]:
    """Return a warning for each node that is much slower than the median node.

    A node is judged by the best of its links: a good node beside a slow one has another, good link.
    Two nodes have only one link, so neither can be told from the other.
    """
    if len(links) < 3:
        return []
    best = {
        node: Figures(min(each.latency_s for each in own), max(each.bytes_per_s for each in own))
        for node, own in links.items()
    }
    median = Figures(*map(statistics.median, zip(*best.values(), strict=True)))
    return [
        f"warning: preflight: {nodes_text([node], hosts)} is slow: its best link has {own}, that of the median node "
        f"{median}. All ranks wait for it; look at its network, or replace it."
        for node, own in sorted(best.items())
        if own.latency_s > max(_TIMES_SLOWER * median.latency_s, _LATENCY_FLOOR_S)
        or own.bytes_per_s < median.bytes_per_s / _TIMES_SLOWER
    ]


class Bench:
    """Measures over a process group of all ranks, which meets at `store`: gloo on CPUs or NCCL on CUDA devices."""

    def __init__(self, place: Place, backend: str, store: Any) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._place, self._backend, self._store = place, backend, store
        self._device = f"cuda:{place.local_rank}" if backend == "nccl" else "cpu"
        self.found: dict[int, Figures] = {}  # the other end of a link of this node -> what was measured of it
        self.reduced = Figures(0, 0)  # latency and algorithm bandwidth (bytes / time) of an all-reduce over all ranks

    def _join(self) -> None:
        """Make the group, in whichever stage comes first: what fails there is that stage's."""
        if self._dist.is_initialized():
            return
        place = self._place
        if self._backend == "nccl":
            # So that a call that waits too long raises here, instead of ending the process from a thread.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            self._torch.cuda.set_device(place.local_rank)
        self._dist.init_process_group(
            self._backend,
            store=self._store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=_OPERATION_S),
        )

    def links(self) -> Report:
        """Measure this node's links; others than local rank 0 wait."""
        self._join()
        place = self._place
        for phase in ring_phases(place.nodes):
            for link in phase:
                ends = (link, (link + 1) % place.nodes)
                if place.local_rank == 0 and place.node in ends:
                    first = place.node == ends[0]
                    other = ends[first]
                    self.found[other] = self._link(other, first)
            self._all_reduce(self._tensor(4))  # all of this phase are done
        return {"links": list(self.found.values())}

    def all_reduce(self) -> Report:
        """Measure an all-reduce over all ranks."""
        self._join()
        self.reduced = self._measure(self._all_reduce, _ALL_REDUCE_BYTES[self._backend], statistics.median)
        return {}

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()

    def _link(self, other: int, first: bool) -> Figures:
        """Play ping-pong with local rank 0 of the other node; half a round is one way.

        The best round counts, since nodes are compared by it: what else the machines do makes rounds longer.
        """
        peer = other * self._place.nproc

        def round_trip(ball: Any) -> None:
            for sends in (first, not first):
                if sends:
                    self._dist.send(ball, peer)
                else:
                    self._dist.recv(ball, peer)
            self._synchronize()

        return self._measure(round_trip, _LINK_BYTES[self._backend], lambda times: min(times) / 2)

    def _tensor(self, size: int) -> Any:
        return self._torch.zeros(size // 4, dtype=self._torch.float32, device=self._device)

    def _all_reduce(self, tensor: Any) -> None:
        self._dist.all_reduce(tensor)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._backend == "nccl":
            self._torch.cuda.synchronize()

    def _measure(self, operation: Callable[[Any], None], size: int, choose: Callable[[list[float]], float]) -> Figures:
        """Return what `operation` takes for 4 bytes and for `size`, each as `choose` takes it from several laps."""
        chosen = []
        for tensor, laps in ((self._tensor(4), _LAPS), (self._tensor(size), _BULK_LAPS)):
            operation(tensor)  # the first one connects, allocates, and opens TCP's window
            times = []
            for _ in range(laps):
                begun = time.perf_counter()
                operation(tensor)
                times.append(time.perf_counter() - begun)
            chosen.append(choose(times))
        return Figures(chosen[0], size / chosen[1])


# --- the script -----------------------------------------------------------------------------------


def main() -> None:
    """Go through the stages; an exception ends the launch, and its text names the nodes at fault."""
    import torch
    from torch.distributed import PrefixStore, TCPStore, is_nccl_available

    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    place = Place(*(int(os.environ[name]) for name in names))
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
    """Meet the others; return the backend, and the host and address of each node."""

    def judge(reports: list[Report]) -> Report:
        firsts = reports[:: place.nproc]
        hosts, addresses = [each["host"] for each in firsts], [each["here"] for each in firsts]
        return {"backend": choose_backend(reports, place.nproc), "hosts": hosts, "addresses": addresses}

    own = {"host": socket.gethostname(), "here": here, "devices": devices, "cuda": devices >= place.nproc}
    return stages.run("the start", lambda: own, judge, _ARRIVE_S)


def _connect(stages: Stages, place: Place, main_addr: str, plan: Report) -> None:
    """See whether this node reaches the next one on a port that nobody has pinned."""

    def work() -> Report:
        address, port = plan["addresses"][place.next_node]
        # The control node is reached as this node has reached it already.
        target = (main_addr if place.next_node == 0 else address, port)
        return {"why": connect_to(target, _CONNECT_S) if place.local_rank == 0 else None}

    def judge(reports: list[Report]) -> Report:
        return judge_connections(reports, place.nproc, plan["hosts"])

    stages.run("connecting the nodes", work, judge, _CONNECT_S + _MARGIN_S)


def _measure(stages: Stages, place: Place, plan: Report, store: Any) -> None:
    """Measure the links if that is asked for, and the all-reduce, and say what came of it."""
    bench, wait_s = Bench(place, plan["backend"], store), _OPERATION_S + _MARGIN_S
    if "links" in sys.argv[1:]:
        _measure_links(stages, place, plan, bench, wait_s)
    stages.run("the all-reduce", bench.all_reduce, lambda reports: {}, wait_s)
    if place.local_rank == 0:
        _say(summary(place, plan["hosts"][place.node], bench.reduced, bench.found.get(place.next_node)))
    bench.close()


def _measure_links(stages: Stages, place: Place, plan: Report, bench: Bench, wait_s: float) -> None:
    """Measure the links between the nodes, and warn of slow nodes."""

    def judge_links(reports: list[Report]) -> Report:
        figures = {node: [Figures(*each) for each in own["links"]] for node, own in enumerate(reports[:: place.nproc])}
        return {"warnings": slow_nodes(figures, plan["hosts"])}

    answer = stages.run("measuring the links", bench.links, judge_links, wait_s)
    for warning in answer["warnings"] if place.rank == 0 else ():
        _say(warning)


def summary(place: Place, host: str, reduced: Figures, link: Figures | None) -> str:
    """Return the line in which a node says what it measured."""
    # nccl-tests' factor (doc/PERFORMANCE.md): what each rank must send and receive, so that the figure can be held
    # against the hardware's, whatever the number of ranks.
    bus = _short(reduced.bytes_per_s * 2 * (place.world - 1) / place.world / 1e9)
    who = f"preflight: node {place.node} (host {host})"
    line = f"{who}: all-reduce over {place.world} ranks: {reduced} (bus {bus} GB/s)"
    return line if link is None else f"{line}; link to node {place.next_node}: {link}"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it is a script


if __name__ == "__main__":
    # Modules beside this file have names that another package's may have, too.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        main()
    except PreflightError as error:  # where in this file it was found tells nobody anything
        raise error.with_traceback(None) from None
