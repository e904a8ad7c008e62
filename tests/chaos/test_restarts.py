"""Several failures at once, or one after the other: the gang decides once for each, and the same everywhere."""

from __future__ import annotations


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
