"""One node of a gang, without Metaflow around it: joins as the decorator does, runs torchrun, notes what came of it.

Its only argument is a JSON object; see `Gang.start` in ``test_networks.py``. The gang's address record is a file.
"""

import json
import os
import socket
import sys
import time
from dataclasses import asdict

from metaflow_extensions.torchrun.plugins.torchrun.address_book import AddressBook
from metaflow_extensions.torchrun.plugins.torchrun.devices import this_machine
from metaflow_extensions.torchrun.plugins.torchrun.events import to_log
from metaflow_extensions.torchrun.plugins.torchrun.executor import Context, TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.joining import control_addresses, join_as_control, join_as_member
from metaflow_extensions.torchrun.plugins.torchrun.settings import parse_settings

HERE = os.path.dirname(os.path.abspath(__file__))
NUM_NODES = 2


class FileBook(AddressBook):
    """The record of one gang as a file, where the hosts of a test have nothing else in common."""

    def __init__(self, path):
        self._path = path
        self._where = path

    def publish(self, address, *_):
        with open(self._path + ".part", "w") as file:
            json.dump(asdict(address), file)
        os.replace(self._path + ".part", self._path)

    def _read(self):
        if not os.path.exists(self._path):
            return None
        with open(self._path) as file:
            return json.load(file)


def own_name_resolved():
    """Return what Metaflow 2.19 takes for the control node's address on AWS Batch."""
    return socket.gethostbyname_ex(socket.gethostname())[-1][0]


def join(node, book, settings, main_ip):
    """Return this node's seat, the control node's address, and how to wait for the others."""
    if node > 0:
        return *join_as_member(book, node, NUM_NODES, settings, to_log), lambda: None
    main_ip = main_ip or own_name_resolved()
    seat, channel = join_as_control(book, NUM_NODES, main_ip, settings, to_log, False)

    def await_all():
        while channel.gang.absent:
            time.sleep(0.02)

    return seat, control_addresses(main_ip, False)[0], await_all


def main(node, out, settings, entrypoint, main_ip):
    parsed = parse_settings(settings, "train")
    begun = time.monotonic()
    seat, main_addr, await_all = join(node, FileBook(os.path.join(out, "book.json")), parsed, main_ip)
    facts = {"main_addr": main_addr, "join_s": time.monotonic() - begun, "host": socket.gethostname()}
    error = None
    try:
        if entrypoint is None:
            await_all()
        else:
            executor = TorchrunExecutor(Context(seat, main_addr, this_machine(), parsed, flow_dir=HERE))
            facts["command"] = executor.run(entrypoint, nproc_per_node=1, env={"OUT": out}).command
    except BaseException as caught:
        error = caught
        raise
    finally:
        seat.leave(error)
    with open(os.path.join(out, f"node-{node}.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
