"""How often the nodes of a gang ask the datastore: beside a plain `@parallel` step, and beside metaflow-torchrun of PyPI.

The flows are real, and so is the S3 client; an S3 of this machine counts. The step takes five seconds. To make a gang of
32 nodes fit on a small machine, a stand-in without PyTorch starts the workers of our flows; torchrun never asks the
datastore.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import s3
from packages import with_others
from pods import Backend
from report import Report, parser
from starting import HERE

STAND_IN = str(HERE.parent / "tests" / "stand_in")
LIMIT_S = 1200.0
JOINING, EVENTS = "torchrun_gang.json", "torchrun_events.json"
OF_PYPI = "/mf.torchrun"
METAFLOW = "Metaflow's own"
A_NODE = 3.0


def run(server: s3.S3, python: Path, nodes: int, decorator: str, **env: str) -> Counter[str]:
    """Run the nodes of a gang, which all start at once; return how many requests they made for which objects."""
    launch = {"options": {"entrypoint": str(HERE / "waiting_worker.py"), "nproc_per_node": 1}, "after_s": 0}
    asked = {"decorator": decorator, "nodes": nodes, "launches": [launch], "ranks_here": 1}
    with tempfile.TemporaryDirectory() as folder:
        backend = Backend(python, Path(folder), {**server.env(), "BENCHMARK_SECONDS": "5", **env}, asked)
        backend.run_until_gang()
        server.requests.clear()
        processes = [backend.start_node(node) for node in range(nodes)]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for node in (node for node, code in enumerate(codes) if code):
            sys.exit(f"node {node} of {nodes} with @{decorator} failed:\n{backend.log(str(node))}")
    names = (JOINING, EVENTS, OF_PYPI)
    return Counter(next((name for name in names if name in path), METAFLOW) for path in server.requests)


def measure(report: Report, server: s3.S3, nodes: int, others: Path | None) -> None:
    """Count with one number of nodes."""
    plain = run(server, Path(sys.executable), nodes, "parallel")
    ours = run(server, Path(sys.executable), nodes, "torchrun", PYTHONPATH=STAND_IN)
    report.add(f"{nodes} nodes: plain @parallel", [plain[METAFLOW] / nodes], "a node")
    report.add(f"{nodes} nodes: more with @torchrun, to join", [ours[JOINING] / nodes], "a node", target=A_NODE)
    report.add(f"{nodes} nodes: more with @torchrun, events", [ours[EVENTS]], "in all")
    more = (ours[METAFLOW] - plain[METAFLOW]) / nodes
    report.add(f"{nodes} nodes: more with @torchrun, anything else", [more], "a node")
    if others is not None:
        theirs = run(server, others, nodes, "torchrun")
        report.add(f"{nodes} nodes: more with metaflow-torchrun of PyPI", [theirs[OF_PYPI] / nodes], "a node")


def main() -> None:
    """Count with each number of nodes."""
    cache = Path(".bench/others")
    given = parser(__doc__, nodes=[2, 8, 32], others_up_to=8, cache=cache).parse_args()
    report = Report("datastore requests")
    with s3.s3_if_there(report) as server:
        others = with_others(given.cache, report) if given.others_up_to else None
        for nodes in given.nodes if server is not None else ():
            measure(report, server, nodes, others if nodes <= given.others_up_to else None)
    report.finish(given.json)


if __name__ == "__main__":
    main()
