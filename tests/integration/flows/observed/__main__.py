"""The same as a module, ``python -m observed``; the first time that it is started it ends as `stopped` does."""

from . import interpreter, kernel  # isort: skip - the first notes which modules there are
from .note import LAUNCH, note

note("seen", same={**interpreter.everything(), **kernel.everything()}, random=interpreter.of_randomness())

if LAUNCH.endswith("-0"):
    from . import stopped

    stopped.main()
