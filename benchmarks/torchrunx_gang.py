"""Runs the worker of `failures.py` by torchrunx, on two hosts that are this machine."""

import sys

import failing_worker
import torchrunx

if __name__ == "__main__":
    hosts = ["localhost", "127.0.0.1"]
    launcher = torchrunx.Launcher(hostnames=hosts, workers_per_host=int(sys.argv[1]), backend="gloo")
    launcher.run(failing_worker.work)
