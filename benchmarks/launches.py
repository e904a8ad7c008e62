"""How long a launch takes until its first collective is done: by `current.torch.run`, cold and warm, and by torchrun.

With `run`, the time begins when the last node calls it. With torchrun alone, it begins before the first of its
processes is started, as by a shell for each node. It ends when the last rank has done a collective. A second launch
of the same step and a restart after a failure are compared with the first launch of torchrun, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pairs import differences, in_turns, ratios
from report import Report, parser
from starting import COLD, HEATS, HERE, WARM_AGENT, WARM_WORKERS, Launch, Shape, by_flow, by_torchrun, count_gpus, last

SCRIPT = HERE / "collective_worker.py"
_SECOND_AFTER_S = 5.0  # of the step after its first launch
TARGETS = {COLD: 1.05, WARM_AGENT: 0.75, WARM_WORKERS: 0.05}
_LATER = 0.10  # of a second launch and of a restart, with warm workers
FIRST, SECOND, RESTART = "first launch", "second launch", "restart"
Times = dict[str, float]


def of_torchrun(shape: Shape, backend: str) -> Times:
    """Measure torchrun alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_torchrun(folder, shape, SCRIPT, backend)
        return {FIRST: last(folder, "collective-0-0-*") - last(folder, "begin-0-*")}


def of_us(shape: Shape, backend: str, heat: str, entrypoint: str, settle_s: float, more: bool) -> Times:
    """Measure the first launch of a step, and if there is to be `more`, a second one and one that restarts."""
    asked = {"entrypoint": str(SCRIPT)} if entrypoint == "script" else {}
    # While the step's own code runs, spares get ready; a cold start has no use for that time.
    launches = [Launch({**asked, "entrypoint_args": [backend]}, 0.0 if heat == COLD else settle_s)]
    if more:
        launches.append(Launch({**asked, "entrypoint_args": [backend]}, _SECOND_AFTER_S))
        fails = {"entrypoint_args": [backend, str(settle_s)], "max_restarts": 1}
        launches.append(Launch({**asked, **fails}, settle_s))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_flow(folder, shape, launches, heat)
        times = {FIRST: last(folder, "collective-0-0-*") - last(folder, "begin-0-*")}
        if more:
            times[SECOND] = last(folder, "collective-1-0-*") - last(folder, "begin-1-*")
            times[RESTART] = last(folder, "collective-2-1-*") - last(folder, "failed-2")
        return times


def measure(
    report: Report, shape: Shape, backend: str, rounds: int, settle_s: float, more: bool, chosen: list[str]
) -> None:
    """Measure all variants of one shape in turns, and compare each with torchrun alone."""
    variants: dict[str, Callable[[], Times]] = {"torchrun": partial(of_torchrun, shape, backend)}
    for heat in chosen:
        for entrypoint in ("script", "function"):
            has_more = more and entrypoint == "script"
            variants[f"{heat}, {entrypoint}"] = partial(of_us, shape, backend, heat, entrypoint, settle_s, has_more)
    where = f"{shape}, {backend}"
    taken = in_turns(variants, rounds, lambda text: print(f"{where}, {text}", flush=True))
    bare = [times[FIRST] for times in taken.pop("torchrun")]
    report.add(f"{where}: torchrun alone", bare)
    for name, results in taken.items():
        heat = name.partition(",")[0]
        for what in results[0]:
            values = [times[what] for times in results]
            # The first launch has a target whatever is warm; the others only where nothing is left to be imported.
            target = TARGETS[heat] if what == FIRST else _LATER if heat == WARM_WORKERS else None
            report.add(f"{where}: {what}, {name}", values)
            report.add(f"{where}: {what}, {name} / torchrun", ratios(values, bare), "", target)
            if heat == COLD and what == FIRST:
                report.add(f"{where}: {what}, {name} - torchrun", differences(values, bare))


def main() -> None:
    """Measure each shape with gloo, and with NCCL on all GPUs where there are some."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--shapes", nargs="*", default=["2x2", "1x4"], metavar="NODESxPROCESSES")
    options.add_argument("--heats", nargs="+", choices=HEATS, help="default: all")
    options.add_argument("--settle", type=float, default=6.0, help="seconds of the step before a warm launch")
    given = options.parse_args()
    report = Report("launches")
    chosen = given.heats or HEATS
    compare = partial(measure, report, rounds=given.rounds, settle_s=given.settle, chosen=chosen)
    for shape in (Shape(*map(int, text.split("x"))) for text in given.shapes):
        compare(shape, "gloo", more=shape.nodes > 1)
    if gpus := count_gpus():
        compare(Shape(1, gpus), "nccl", more=True)
    else:
        report.note("NCCL: skipped, there is no NVIDIA GPU that torch can use")
    report.finish(given.json)


if __name__ == "__main__":
    main()
