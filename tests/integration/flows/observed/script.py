"""Notes what it sees as it begins, and then what comes of torch and of processes of its own."""

import seen  # first, since it notes which modules there are

at_begin, random = seen.everything(), seen.drawn()

import multiprocessing  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402


@dataclass
class Thing:
    """A class of the program's own, which is pickled by its name."""

    value: int

    def looked(self) -> list[object]:
        """Return what a child sees."""
        main = sys.modules["__main__"]
        return [Thing(2 * self.value), main.__file__, sys.argv, sys.path, sorted(os.environ), os.getcwd()]


def by_children() -> dict[str, object]:
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            thing, *rest = pool.apply(Thing(21).looked)
        found[f"child by {method}"] = [type(thing) is Thing, thing.value, *rest]
    return found


def with_torch() -> dict[str, object]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    torch.set_num_interop_threads(2)  # an error once anything has been computed
    torch.manual_seed(1)
    left = torch.rand(300, 300, requires_grad=True)
    (left @ left.T).sin().sum().backward()
    dist.init_process_group("gloo")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {
        "modules with torch": sorted(sys.modules),
        "threads that compute": [torch.get_num_threads(), torch.__config__.parallel_info()],
        "gradient": left.grad.sum().item(),
        "reduced": total.item(),
        "loaded": torch.stack(list(DataLoader(range(4), num_workers=2))).tolist(),
        "variables with torch": sorted(os.environ),
    }


if __name__ == "__main__":
    children = by_children()
    seen.note(same={**at_begin, **children, **with_torch()}, random=random)
