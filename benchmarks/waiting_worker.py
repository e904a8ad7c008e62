"""A worker, and a step, that only wait: without the CPU, until the benchmark opens the other end of a pipe."""

import os


def wait(name: str) -> None:
    """Tell the benchmark who waits here, and wait for its end."""
    folder = os.environ["BENCHMARK_FOLDER"]
    with open(os.path.join(folder, f".{name}"), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    os.replace(file.name, os.path.join(folder, name))
    with open(os.path.join(folder, "end"), encoding="ascii"):
        pass


if __name__ == "__main__":
    print("waits", flush=True)
    wait(f"worker-{os.environ['RANK']}")
