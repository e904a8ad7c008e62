"""Fails the first time that it is started, and then sees all that it can see."""

import os
import sys

path = os.path.join(os.environ["GANG_OUT"], os.environ["TORCHELASTIC_RUN_ID"].split("-")[0])
if not os.path.exists(path):
    os.close(os.open(path, os.O_CREAT))
    print("fails once")
    sys.exit(22)
__import__("plainly")
