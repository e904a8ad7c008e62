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

HERE = Path(__file__).parent
STAND_IN = HERE.parent / "tests" / "stand_in"
LIMIT_S = 1200.0
JOINING, EVENTS = "torchrun_gang.json", "torchrun_events.json"
OF_PYPI = "/mf.torchrun"
METAFLOW = "Metaflow's own"
A_NODE = 3.0


def run(server: s3.S3, python: Path, nodes: int, decorator: str, **env: str) -> Counter[str]:
    """Run the nodes of a gang, which all start at once; return how many requests they made for which objects."""
    own = {"BENCHMARK_DECORATOR": decorator, "BENCHMARK_NODES": str(nodes), **server.env(), **env}
    with tempfile.TemporaryDirectory() as folder:
        backend = Backend(python, HERE / "asking_flow.py", Path(folder), own)
        backend.run_until_gang()
        server.requests.clear()
        processes = [backend.start_node(node, nodes) for node in range(nodes)]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            failed = next(node for node, code in enumerate(codes) if code)
            sys.exit(f"node {failed} of {nodes} with @{decorator} failed:\n{backend.log(failed)[-8000:]}")
    return Counter(kind(request.path) for request in server.requests)


def kind(path: str) -> str:
    """Tell what a request is for."""
    for name in (JOINING, EVENTS, OF_PYPI):
        if name in path:
            return name
    return METAFLOW


def main() -> None:
    """Count with each number of nodes."""
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32])
    options.add_argument("--others-up-to", type=int, default=8, help="nodes of a gang of PyPI's; 0 leaves it out")
    options.add_argument("--cache", type=Path, help="folder in which PyPI's package stays installed")
    given = options.parse_args()
    report = Report("datastore requests")
    with tempfile.TemporaryDirectory() as folder, s3.s3_if_there(report) as server:
        if server is None:
            return report.finish(given.json)
        others = with_others(given.cache or Path(folder) / "others") if given.others_up_to else None
        if others is None:
            report.note("metaflow-torchrun of PyPI: skipped, it is not wanted or could not be installed")
        for nodes in given.nodes:
            plain = run(server, Path(sys.executable), nodes, "parallel")
            ours = run(server, Path(sys.executable), nodes, "torchrun", PYTHONPATH=str(STAND_IN))
            name = f"{nodes} nodes"
            report.add(f"{name}: plain @parallel", [plain[METAFLOW] / nodes], "a node")
            report.add(f"{name}: more with @torchrun, to join", [ours[JOINING] / nodes], "a node", target=A_NODE)
            report.add(f"{name}: more with @torchrun, events", [ours[EVENTS]], "in all")
            more = (ours[METAFLOW] - plain[METAFLOW]) / nodes
            report.add(f"{name}: more with @torchrun, anything else", [more], "a node")
            if others is not None and nodes <= given.others_up_to:
                theirs = run(server, others, nodes, "torchrun")
                report.add(f"{name}: more with metaflow-torchrun of PyPI", [theirs[OF_PYPI] / nodes], "a node")
            for text in (f"{name}: {dict(each)}" for each in (plain, ours)):
                print(text, flush=True)
    return report.finish(given.json)


if __name__ == "__main__":
    main()
