"""A flow whose gang begins when a test says so, or never, if it says that the step before is to fail.

The step before writes the gang's script.
"""

import os
import time
from pathlib import Path

from around import Around
from metaflow import current, step, torchrun
from notes import note


class BegunLateFlow(Around):
    @step
    def start(self):
        note("run", current.run_id)
        while not (
            said := [name for name in ("go", "fail") if os.path.exists(os.path.join(os.environ["GANG_OUT"], name))]
        ):
            time.sleep(0.05)
        if said == ["fail"]:
            raise ValueError("as told")
        name = "works"
        Path(f"{name}.py").write_bytes(Path("worker.py").read_bytes())
        self.next(self.train, num_parallel=1)

    @torchrun
    @step
    def train(self):
        current.torch.run("works.py")
        self.next(self.join)


if __name__ == "__main__":
    BegunLateFlow()
