"""The same as a module, ``python -m observed``; at first rank 1 fails."""

from . import seen  # isort: skip - it notes which modules there are

seen.note(same=seen.everything(), random=seen.drawn())

import os  # noqa: E402
import time  # noqa: E402

from spares import await_spares  # noqa: E402

if seen.LAUNCH.endswith("-0"):
    if os.environ["RANK"] == "0":
        time.sleep(60.0)
    while not os.path.exists(os.path.join(os.environ["GANG_OUT"], f"seen-{seen.LAUNCH}-0.json")):
        time.sleep(0.05)
    with open(os.path.join(os.environ["GANG_OUT"], "spares")) as file:
        await_spares(int(file.read()))
    raise ConnectionError("rank 1 fails")
