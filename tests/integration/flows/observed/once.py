"""Fails the first time that it is started, and then sees all that it can see."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from spares import await_spares

path = os.path.join(os.environ["GANG_OUT"], os.environ["TORCHELASTIC_RUN_ID"].split("-")[0])
if not os.path.exists(path):
    os.close(os.open(path, os.O_CREAT))
    with open(os.path.join(os.environ["GANG_OUT"], "spares")) as file:
        await_spares(int(file.read()))
    print("fails once")
    sys.exit(22)
__import__("plainly")
