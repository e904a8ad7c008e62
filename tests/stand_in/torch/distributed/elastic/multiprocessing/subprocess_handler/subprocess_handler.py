"""How torchrun starts and stops a worker: the other part of its interface that an agent of ours changes."""

import os
import signal
from subprocess import Popen


class SubprocessHandler:
    """One worker, in a session of its own."""

    def __init__(self, args, env, stdout, stderr):
        self._stdout, self._stderr = stdout, stderr
        self.proc = self._popen(args, env)

    def _popen(self, args, env):
        return Popen(args=args, env=env, stdout=self._stdout, stderr=self._stderr, start_new_session=True)

    def close(self, death_sig=signal.SIGTERM):
        """Send it a signal."""
        os.killpg(self.proc.pid, death_sig)
