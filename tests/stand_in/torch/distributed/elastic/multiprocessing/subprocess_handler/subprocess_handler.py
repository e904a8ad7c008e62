"""How torchrun starts and stops a worker: the other part of its interface that an agent of ours changes."""

import os
import signal
from subprocess import Popen


class SubprocessHandler:
    """One worker, in a session of its own."""

    def __init__(self, args, env, stdout, stderr):
        self.proc = Popen(args=args, env=env, stdout=stdout, stderr=stderr, start_new_session=True)

    def close(self, death_sig=signal.SIGTERM):
        """Send it a signal."""
        os.killpg(self.proc.pid, death_sig)
