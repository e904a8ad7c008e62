"""As `script`, without torch."""

import interpreter
import kernel
from note import note

note("seen", same={**interpreter.everything(), **kernel.everything()}, random=interpreter.of_randomness())
