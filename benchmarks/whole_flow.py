"""What a whole flow takes whose step runs an empty script: beside the same flow without `@torchrun`, and torchrun alone.

Our own share is what is left of the flow with a cold `@torchrun` when the flow without it and torchrun alone are taken
away. Of a flow with warm processes, all that `@torchrun` adds is compared with torchrun alone. Without warm processes,
for whose end nobody waits, the CPU of all processes is told, too: other work on the machine changes it less.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pairs import differences, in_turns, ratios
from report import Report, parser
from starting import COLD, HERE, Launch, Shape, Took, by_flow, by_torchrun, heats

SCRIPT = HERE / "empty_worker.py"
SHAPE = Shape(2, 1)
PLAIN, TORCHRUN = "plain @parallel", "torchrun alone"
SHARE_S = 0.3


def in_folder(run: Callable[[Path], Took]) -> Took:
    """Return what it returns, given a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder))


def measure(report: Report, rounds: int, before_s: float, chosen: list[str]) -> None:
    """Measure all variants in turns; in those of flows, the step sleeps first, for `before_s` seconds."""
    launches = [Launch({"entrypoint": str(SCRIPT)}, before_s)]
    variants = {
        TORCHRUN: partial(in_folder, lambda folder: by_torchrun(folder, SHAPE, SCRIPT)),
        PLAIN: partial(in_folder, lambda folder: by_flow(folder, SHAPE, launches, None)),
    }
    for heat in chosen:
        variants[heat] = partial(in_folder, partial(by_flow, shape=SHAPE, launches=launches, heat=heat))
    where = f"{SHAPE}, {before_s:g} s before run"
    taken = in_turns(variants, rounds, lambda text: print(f"{where}, {text}", flush=True))
    seconds = {name: [took.seconds for took in results] for name, results in taken.items()}
    cpu = {name: [took.cpu_s for took in taken[name]] for name in (TORCHRUN, PLAIN, COLD)}
    for what, values in (("", seconds), (", CPU", cpu)):
        for name in values:
            report.add(f"{where}: {name}{what}", values[name])
    for what, values, target in (("", seconds, SHARE_S), (", CPU", cpu, None)):
        share = differences(values[COLD], values[PLAIN], values[TORCHRUN])
        report.add(f"{where}: our own share, cold{what}", share, target=target)
    for heat in chosen:
        added = ratios(differences(seconds[heat], seconds[PLAIN]), seconds[TORCHRUN])
        target = None if heat == COLD else 1.0
        report.add(f"{where}: what @torchrun adds, {heat} / torchrun alone", added, "", target)


def main() -> None:
    """Measure with a step that calls `run` at once, and with one that does something else first."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--before", type=float, nargs="+", default=[0.0, 3.0], help="seconds of the step before run")
    given = options.parse_args()
    report = Report("whole flow")
    chosen = heats(report)
    for before_s in given.before:
        measure(report, given.rounds, before_s, chosen)
    report.finish(given.json)


if __name__ == "__main__":
    main()
