"""The same as a module: ``python -m observed``."""

from . import interpreter, kernel  # isort: skip - the first notes which modules there are
from .note import note

note("seen", same={**interpreter.everything(), **kernel.everything()}, random=interpreter.of_randomness())
