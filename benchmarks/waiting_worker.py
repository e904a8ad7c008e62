"""A worker that only waits, without the CPU: some seconds, or until the benchmark opens the other end of a pipe."""

import os
import time

if __name__ == "__main__":
    if seconds := os.environ.get("BENCHMARK_SECONDS"):
        time.sleep(float(seconds))
    else:
        print("waits", flush=True)
        folder = os.environ["BENCHMARK_FOLDER"]
        open(os.path.join(folder, f"worker-{os.environ['RANK']}"), "w", encoding="ascii").close()
        open(os.path.join(folder, "end"), encoding="ascii").close()  # a pipe
