"""What a whole flow takes whose step runs an empty script: beside the same flow without `@torchrun`, and torchrun alone.

Our own share is what is left of the flow with a cold `@torchrun` when the flow without it and torchrun alone are taken
away. Of a flow with spares, all that `@torchrun` adds is compared with torchrun alone. Where nothing is warm, so
that nobody's end is left out, the CPU of all processes is told, too: other work on the machine changes it less.
"""

from __future__ import annotations

from functools import partial

from pairs import differences, in_folder, in_turns, ratios
from report import Report, parser
from starting import COLD, HEATS, HERE, Launch, Shape, by_flow, by_torchrun

SCRIPT = HERE / "empty_worker.py"
SHAPE = Shape(2, 1)
PLAIN, TORCHRUN = "plain @parallel", "torchrun alone"
SHARE_S = 0.3


def measure(report: Report, rounds: int, before_s: float, chosen: list[str]) -> None:
    """Measure all variants in turns; in those of flows, the step sleeps first, for `before_s` seconds."""
    launches = [Launch({"entrypoint": str(SCRIPT)}, before_s)]
    variants = {
        TORCHRUN: partial(in_folder, partial(by_torchrun, shape=SHAPE, script=SCRIPT)),
        PLAIN: partial(in_folder, partial(by_flow, shape=SHAPE, launches=launches, heat=None)),
        **{heat: partial(in_folder, partial(by_flow, shape=SHAPE, launches=launches, heat=heat)) for heat in chosen},
    }
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
    given = parser(__doc__, rounds=7, before=[0.0, 3.0]).parse_args()
    report = Report("whole flow")
    for before_s in given.before:
        measure(report, given.rounds, before_s, HEATS)
    report.finish(given.json)


if __name__ == "__main__":
    main()
