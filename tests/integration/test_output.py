"""What the workers write reaches the node's log: live, labelled, complete."""

from __future__ import annotations

import re

import psutil

MIB = 1024 * 1024


def run(what):
    return [{"entrypoint": "output.py", "entrypoint_args": [what], "nproc_per_node": 2}]


def of_rank(flow, rank):
    label = f"[rank {rank}] "
    return [line.text.split(label, 1)[1] for line in flow.lines if label in line.text]


def test_every_line_is_seen_within_half_a_second(run_flow):
    flow = run_flow(runs_=run("live"))
    delays = [line.at - float(m[1]) for line in flow.lines if (m := re.search(r"\] now ([\d.]+)", line.text))]
    assert len(delays) == 4 * 9
    # The machine may stall for a moment: one burst of one rank may be late.
    assert sum(delay > 0.5 for delay in delays) <= 3, sorted(delays)


def test_output_of_any_shape_is_complete_in_order_and_on_its_stream(run_flow):
    flow = run_flow(runs_=run("shapes"))
    for rank in range(4):
        shown = of_rank(flow, rank)
        lines = [line for line in shown if line != "to stderr"]  # of another stream: it may be shown at any time
        assert lines[:2000] == [f"line {number} of {rank}" for number in range(2000)]
        assert lines[2000:] == [
            "bad \ufffd\ufffd bytes",
            "split é",
            "10%",
            "20%",
            "30%",
            "x" * 300_000,
            "no newline at the end",
        ]
        assert shown.count("to stderr") == 1
    # Metaflow's terminal joins the streams, its log store does not.
    stored = {name: _stored(flow, name) for name in ("stdout", "stderr")}
    assert "[rank 3] to stderr" in stored["stderr"]
    assert "[rank 3] to stderr" not in stored["stdout"]
    assert "[rank 3] line 1999 of 3" in stored["stdout"]
    assert "[rank 3] line 1999 of 3" not in stored["stderr"]


def _stored(flow, stream):
    files = [p for p in flow.home.rglob("*.log") if stream in p.name and "train" in p.parts]
    assert files, [str(p) for p in flow.home.rglob("*.log")]
    return b"".join(p.read_bytes() for p in files).decode(errors="replace")


def test_a_flood_does_not_grow_the_task(start_flow):
    """100 MB of one rank pass through each task."""
    flow = start_flow("--nodes", "1", runs_=[{"entrypoint": "output.py", "entrypoint_args": ["flood"]}])
    (task,) = flow.await_notes("task-0", 1)
    process = psutil.Process(task["pid"])
    base, peak = process.memory_info().rss, 0
    try:
        while flow.process.poll() is None:
            peak = max(peak, process.memory_info().rss)
            psutil.wait_procs([process], 0.05)
    except psutil.NoSuchProcess:
        pass
    assert flow.wait(120) == 0, flow.text[-2000:]
    lines = of_rank(flow, 0)
    assert len(lines) == 100_000
    assert lines[-1].startswith("0000999 ")
    assert (peak - base) / MIB < 20
