"""Several failures at once, or one after the other: the gang decides once for each, and the same everywhere."""

from __future__ import annotations

import signal

AT_ONCE_S = 0.001


def test_two_gangs_of_one_run(make_gang, tmp_path, recorder):
    """They meet in one datastore, as the gangs of a foreach do; one fails, the other does not notice."""
    one, other = make_gang(), make_gang()
    (tmp_path / "datastore").mkdir()
    for number, gang in enumerate((one, other), start=1):
        gang.out.mkdir()
        (gang.out / "datastore").symlink_to(tmp_path / "datastore")
        gang.start(gang=str(number))
    one.await_workers()
    other.await_workers()
    one.tell(1, "exit 3")
    outcome = one.await_end(one.struck_at(1), [0, 1])
    recorder.died("one of two gangs of a run fails", outcome)
    assert "Rank 1 on node 1" in outcome.error["text"]
    recorder.lasted("the other gang of that run", other.end_well())


def test_a_restart_while_another_is_under_way(gang, recorder):
    """Rank 1 fails while it is stopped for rank 0's failure, and again as soon as it is back."""
    gang.start(do="1@0:fail-late 0.3,1@1:exit 4", max_restarts=2)
    gang.await_workers()
    gang.tell(0, "exit 3")
    gang.await_workers("launch0-2")
    recorder.lasted("a worker fails while the gang restarts, and again right after", gang.end_well())
    for node in range(2):
        causes = [(entry["generation"], entry["cause"]) for entry in gang.launch(node)["restarts"]]
        assert [(number, cause["rank"], cause["exit_code"]) for number, cause in causes] == [(1, 0, 3), (2, 1, 4)]
    counts = {gang.note(f"worker-launch0-{number}-{rank}")["restart"] for number in (2,) for rank in range(2)}
    assert counts == {"2"}


def test_all_nodes_fail_within_one_millisecond(make_gang, recorder):
    """Whichever is taken for the first, all nodes are told the same."""
    for _ in range(4):  # another process may have come between the two blows
        gang = make_gang()
        gang.start()
        gang.await_workers()
        struck_at = [gang.send(pid, signal.SIGKILL) for pid in [gang.worker(rank) for rank in range(2)]]
        outcome = gang.await_end(max(struck_at), [0, 1])
        assert "was killed by SIGKILL" in outcome.error["text"]
        if max(struck_at) - min(struck_at) <= AT_ONCE_S:
            break
    else:
        raise AssertionError("not once were both nodes struck at the same time")
    recorder.died("workers of all nodes fail within one millisecond", outcome)


def test_a_failure_in_the_exit_barrier(gang, recorder):
    """Node 0's workers are done and its agent waits in torchrun's exit barrier; then node 1's worker fails."""
    gang.start(do="0:end", agent_env={"LOGLEVEL": "INFO"})  # so that it says that it waits
    gang.await_that(lambda: "Waiting 300 seconds for other agents to finish" in gang.log(0), "the exit barrier")
    assert gang.agent(0) in gang.living()
    gang.tell(1, "exit 3")
    outcome = gang.await_end(gang.struck_at(1), [0, 1])
    recorder.died("a worker fails while the other node waits in torchrun's exit barrier", outcome)
    assert "Rank 1 on node 1" in outcome.error["text"]
    assert "exited with code 3" in outcome.error["text"]
