"""How long a training step of an example takes: under `current.torch.run`, and under torchrun with its defaults.

The script is the example's own. The median of a rank's steps counts, and of the ranks the slowest one. The shapes
are those in which the number of threads differs: torchrun gives one worker of a node all cores, whatever else the
machine runs, and each of several workers one core. `run` gives each worker its share of the cores.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from pairs import in_folder, in_turns, ratios
from report import Report, parser
from starting import COLD, HEATS, HERE, Launch, Shape, by_flow, by_torchrun, count_gpus

WORKER = HERE / "training_worker.py"
EXAMPLES = HERE.parent / "examples"
# With enough steps that the median is steady, and few enough for some seconds.
TRAININGS = {
    "min-gpt": [str(EXAMPLES / "min-gpt" / "train.py"), "--steps", "60", "--sample-length", "1"],
}
TORCHRUN = "torchrun"


def measure(folder: Path, way: str, shape: Shape, words: list[str]) -> tuple[float, int]:
    """Return the seconds of a step, and the number of threads of a worker."""
    if way == TORCHRUN:
        by_torchrun(folder, shape, WORKER, *words)
    else:
        by_flow(folder, shape, [Launch({"entrypoint": str(WORKER), "entrypoint_args": words})], way)
    told = [json.loads(path.read_text()) for path in folder.glob("steps-*")]
    assert len(told) == shape.nodes * shape.nproc, told
    return max(each["step_s"] for each in told), told[0]["threads"]


def compare(report: Report, shape: Shape, device: str, rounds: int, heats: list[str]) -> None:
    """Measure the example in one shape."""
    for example, words in TRAININGS.items():
        where = f"{example}, {shape}, {device}"
        run = partial(measure, shape=shape, words=words)
        variants = {way: partial(in_folder, partial(run, way=way)) for way in (TORCHRUN, *heats)}
        taken = in_turns(variants, rounds, lambda text, where=where: print(f"{where}, {text}", flush=True))
        seconds = {way: [step_s for step_s, _ in results] for way, results in taken.items()}
        for way, results in taken.items():
            report.add(f"{where}: {way}, {results[0][1]} threads", [1000 * each for each in seconds[way]], "ms")
        for heat in heats:
            report.add(f"{where}: {heat} / torchrun", ratios(seconds[heat], seconds[TORCHRUN]), "", 1.0)


def main() -> None:
    """Measure on the CPU, and on all GPUs where there are some."""
    shapes = ["2x1", "1x2"] if len(os.sched_getaffinity(0)) > 2 else ["2x1"]
    given = parser(__doc__, rounds=7, shapes=shapes).parse_args()
    report = Report("step time")
    gpus = count_gpus()
    if not gpus:
        for text in given.shapes:
            compare(report, Shape(*map(int, text.split("x"))), "CPU", given.rounds, [COLD])
        report.note("NCCL: skipped, there is no NVIDIA GPU that torch can use")
    else:
        compare(report, Shape(1, gpus), "GPU", given.rounds, HEATS)
    report.finish(given.json)


if __name__ == "__main__":
    main()
