"""`check_links`, as far as it goes without torch: what it makes of reports and figures."""

import threading
from contextlib import closing

import pytest
from limits import limit_s
from metaflow import check_links
from unit_helpers import HANG_S, eventually

from metaflow_extensions.torchrun.plugins.torchrun import preflight
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import RAISED
from metaflow_extensions.torchrun.plugins.torchrun.preflight import DevicesFail, Place, PreflightError

HOSTS = [f"host-{letter}" for letter in "abcdefgh"]


def test_the_line_of_a_node():
    place = Place(rank=2, local_rank=0, node=1, nproc=2, world=4)
    line = "preflight: node 1 (host b): all-reduce over 4 ranks: 0.210 ms, 1.30 GB/s (bus 1.95 GB/s)"
    assert preflight.summary(place, "b", 0.00021, 1.3e9) == line


def test_a_single_process_has_nothing_to_measure(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    check_links()
    assert "nothing to measure" in capsys.readouterr().out


def test_its_failures_are_of_kinds_that_a_worker_can_raise():
    assert {PreflightError.torchrun_kind, DevicesFail.torchrun_kind} <= set(RAISED)


# --- devices and connections ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "backend"), [((2, 8), "nccl"), ((0, 0), "gloo"), ((1, 1), "gloo"), ((1, 0), "gloo"), ((2, 0, 2), None)]
)
def test_a_device_for_every_worker_means_nccl_and_a_node_that_differs_is_named(devices, backend):
    nodes = [{"host": HOSTS[node], "devices": count, "cuda": count >= 2} for node, count in enumerate(devices)]
    reports = [report for report in nodes for _ in range(2)]
    if backend:
        assert preflight.choose_backend(reports, 2) == backend
        return
    with pytest.raises(PreflightError, match=r"^node 1 \(host host-b\) .*node 0: 2, node 1: 0, node 2: 2; .*each: 2"):
        preflight.choose_backend(reports, 2)


@pytest.mark.parametrize(
    ("why", "named"),
    [
        ([None] * 4, None),
        ([None, "timed out", "timed out", None], "node 2 (host host-c)"),
        (["timed out", None, None, "timed out"], "node 0 (host host-a)"),
        ([None, "timed out", None, None], "nodes 1 (host host-b), 2 (host host-c)"),
        ([None, "timed out", "timed out", "timed out"], "nodes 2 (host host-c), 3 (host host-d)"),
        ([None, "timed out"], "nodes 0 (host host-a), 1 (host host-b)"),
    ],
)
def test_the_node_that_two_ways_fail_at_is_to_blame(why, named):
    reports = [{"why": reason} for reason in why for _ in range(2)]
    if named is None:
        assert preflight.judge_connections(reports, 2, HOSTS) == {}
        return
    with pytest.raises(PreflightError, match=r"node 1 to node [02]: timed out|node 0 to node 1: timed out") as caught:
        preflight.judge_connections(reports, 2, HOSTS)
    assert str(caught.value).startswith(f"{named} can't be reached from a neighbour")


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.1"])
def test_connecting_and_on_a_local_run_from_nowhere_else(address):
    with closing(preflight.listen(address)) as listener:
        port = listener.getsockname()[1]
        assert preflight.connect_to((preflight.own_address("127.0.0.1"), port), 5) is None
        refused = preflight.connect_to(("127.0.0.2", port), 5)
        assert (refused is not None) is (address == "127.0.0.1")
    assert "refused" in preflight.connect_to(("127.0.0.1", port), 5)


# --- the stages -----------------------------------------------------------------------------------


class Store(dict):
    """What a torch store does, in one process."""

    set = dict.__setitem__

    def get(self, key):
        return self[key].encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def wait(self, keys, timeout):
        eventually(lambda: self.check(keys), within_s=timeout.total_seconds())


@pytest.fixture
def play(monkeypatch):
    """Return a function that has each rank do its work, None is silent, and returns what came of each."""

    def play(works, judge=lambda reports: {"sum": sum(report["n"] for report in reports)}, wait_s=5.0, margin_s=0.2):
        monkeypatch.setattr(preflight, "_MARGIN_S", margin_s)
        store, came, nproc = Store(), {}, max(1, len(works) // 2)

        def rank_does(rank, work):
            stages = preflight.Stages(store, Place(rank, rank % nproc, rank // nproc, nproc, len(works)))
            stages.hosts = HOSTS
            try:
                came[rank] = stages.run("the test", work, judge, wait_s)
            except PreflightError as error:
                came[rank] = str(error)

        threads = [threading.Thread(target=rank_does, args=(rank, work)) for rank, work in enumerate(works) if work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s(HANG_S))
        return came

    return play


def says(number):
    return lambda: {"n": number}


def breaks():
    raise ValueError("it's broken")


def is_refused():
    raise RuntimeError("[gloo/transport/tcp/pair.cc:144] Connection refused")


@pytest.mark.parametrize(("works", "kind"), [(breaks, DevicesFail), (is_refused, PreflightError)])
def test_what_has_failed_is_the_network_only_where_a_connection_has(works, kind):
    stages = preflight.Stages(Store(), Place(0, 0, 0, 1, 1))
    stages.hosts = HOSTS
    with pytest.raises(PreflightError) as caught:
        stages.run("the test", works, len, 0.5)
    assert type(caught.value) is kind


def refuses(reports):
    raise PreflightError("node 1 is odd")


NOT_IN = "node 1 (host host-b) did not take part in the test: no message within 0.2 s."
NO_ANSWER = "node 0 did not answer after the test: its rank 0 is stuck or slow."
BROKEN = "; ".join(f"rank {rank}: ValueError: it's broken" for rank in (1, 3))


@pytest.mark.parametrize(
    ("works", "wait_s", "came"),
    [
        ([says(1), says(2), says(4), says(0)], 5.0, {rank: {"sum": 7} for rank in range(4)}),
        # Nobody waits for ever where rank 0 has raised, or is not there.
        ([says(1), says(2), None, says(4)], 0.2, {0: NOT_IN, 1: NO_ANSWER, 3: NO_ANSWER}),
        ([None, says(1)], 0.2, {1: NO_ANSWER}),
        (
            [says(1), breaks, says(2), breaks],
            0.5,
            {0: f"the test failed on nodes 0 (host host-a), 1 (host host-b). {BROKEN}"}
            | dict.fromkeys((1, 2, 3), NO_ANSWER),
        ),
        # Rank 0 has failed itself, so it waits a little only: as long as the margin.
        ([breaks, None], 3600.0, {0: NOT_IN}),
    ],
    ids=["all answer", "one is silent", "without rank 0", "two fail", "rank 0 fails"],
)
def test_every_rank_hears_the_answer_or_who_is_at_fault(works, wait_s, came, play):
    assert play(works, wait_s=wait_s) == came
    assert play([says(1), says(2)], refuses, wait_s=0.1)[0] == "node 1 is odd"
