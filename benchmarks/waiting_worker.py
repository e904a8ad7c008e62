"""A worker that only waits, without the CPU, until the benchmark opens the other end of a pipe."""

import os

if __name__ == "__main__":
    print("waits", flush=True)
    folder = os.environ["BENCHMARK_FOLDER"]
    open(os.path.join(folder, f"worker-{os.environ['RANK']}"), "w", encoding="ascii").close()
    open(os.path.join(folder, "end"), encoding="ascii").close()  # a pipe
