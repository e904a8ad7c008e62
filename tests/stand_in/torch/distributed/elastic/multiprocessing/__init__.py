"""Where workers write: the part of torchrun's interface that an agent of ours changes."""

import os
from dataclasses import dataclass, field


@dataclass
class LogsDest:
    """Local rank -> path; an empty one is the agent's own stream."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)


class DefaultLogsSpecs:
    """Makes a folder for each worker."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where the workers with these environments write."""
        found = LogsDest()
        for local_rank, env in envs.items():
            folder = os.path.join(self._log_dir, f"{env['TORCHELASTIC_RUN_ID']}_stand_in", "attempt_0", str(local_rank))
            os.makedirs(folder)
            found.stdouts[local_rank] = found.stderrs[local_rank] = ""
            found.error_files[local_rank] = os.path.join(folder, "error.json")
        return found
