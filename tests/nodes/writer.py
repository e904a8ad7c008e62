"""A worker without torch that writes numbered lines of 100 bytes: ``WORKER_DO`` is ``COUNT [PER_SECOND [RANK]]``.

``PER_SECOND`` 0 is as fast as it can. The rank fails after that.
"""

import os
import sys
import time

RANK = os.environ["RANK"]
LINE_BYTES = 100

words = os.environ["WORKER_DO"].split()
count, per_second, fails = words + ["0", "none"][len(words) - 1 :]
begun = time.monotonic()
for number in range(int(count)):
    sys.stdout.write(f"writer {RANK} {number:07d} ".ljust(LINE_BYTES - 1, "x") + "\n")
    if int(per_second):
        sys.stdout.flush()
        time.sleep(max(0.0, begun + number / int(per_second) - time.monotonic()))
if fails == RANK:
    raise SystemExit("told to fail")
