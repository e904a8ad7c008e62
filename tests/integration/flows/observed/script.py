"""Sees all that a program can see, first as it begins and then with torch."""

import interpreter  # first, since it notes which modules there are
import kernel
from note import note

at_start = {**interpreter.everything(), **kernel.everything()}
random = interpreter.of_randomness()


def main() -> None:
    import with_torch

    seen = with_torch.everything()
    drawn = with_torch.randomness()
    came_of_it = with_torch.computed()
    files = {f"open files with torch: {fd}": how for fd, how in kernel.of_files().items()}
    status = {f"status with torch: {name}": value for name, value in kernel.of_status().items()}
    came_of_it.update(with_torch.reduced())
    note("seen", same={**at_start, **seen, **files, **status, **came_of_it}, random={**random, **drawn})


if __name__ == "__main__":
    main()
