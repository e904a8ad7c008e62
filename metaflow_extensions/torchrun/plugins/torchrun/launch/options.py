"""What ``torchrun_args`` may say: options that contradict the gang or break a launch are refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TorchrunConfigError
from ..gang.group import Group
from .arguments import OPTIONS, torchrun_options

STATIC_BACKEND = "static"
# Options of torchrun (2.13) that would break what a launch promises, and why.
_REFUSED = {
    "help": "torchrun would print its help and start no worker. See docs/reference.md for what it can do here.",
    "run-path": "torchrun would fork its workers from a process with threads; without it the script runs the same.",
    "virtual-local-rank": "all ranks of a node would have LOCAL_RANK 0, by which their output and their ends are told "
    "apart; set CUDA_VISIBLE_DEVICES in the script instead.",
}


@dataclass(frozen=True)
class Node:
    """What a launch must know of its node."""

    num_nodes: int
    node_index: int
    main_addr: str
    flow_dir: str | None = None  # the folder of the flow file, if there is one
    spare_nodes: int = 0  # of all nodes, so many wait

    @property
    def group(self) -> Group:
        """The nodes that take part, unless some are lost before."""
        return Group(self.num_nodes - self.spare_nodes)


def options_of(given: Mapping[str, Any] | Sequence[Any] | None, node: Node) -> dict[str, str | None]:
    """Return ``torchrun_args`` as `torchrun_options` does, without what the gang does anyway; refuse what has no use."""
    options = torchrun_options(given)
    _refuse_what_has_no_use(options)
    _refuse_what_the_gang_decides(options, node)
    return options


def refuse_variables(env: Mapping[str, str]) -> None:
    """Refuse variables from which torchrun (2.13, argparse_util.py) takes its options."""
    for name in OPTIONS:
        if (variable := f"PET_{name.upper().replace('-', '_')}") in env:
            raise TorchrunConfigError(f"env sets {variable}, an option of torchrun. Write {name} in torchrun_args.")


def _refuse_what_has_no_use(options: Mapping[str, str | None]) -> None:
    for name, why in _REFUSED.items():
        if name in options:
            raise TorchrunConfigError(f"torchrun_args {name} can't be used: {why}")
    fewest, colon, most = (options.get("nnodes") or "").partition(":")
    if colon and fewest != most:
        raise TorchrunConfigError(
            f"torchrun_args nnodes={fewest}:{most} asks for a gang of changing size, but all nodes take part in a launch: "
            "remove nnodes, and set max_restarts to have all workers start again after a failure."
        )


def _refuse_what_the_gang_decides(options: dict[str, str | None], node: Node) -> None:
    """Drop options that say what the gang does anyway; refuse those that contradict it."""
    size, address = node.group.size, "the control node's address, which every node finds by itself"
    addresses = (node.main_addr, bracketed(node.main_addr))
    host, colon, port = (options.get("rdzv-endpoint") or "").rpartition(":")
    if colon and host in addresses:  # it says what the gang does, and pins the port
        options.pop("rdzv-endpoint")
        options.setdefault("master-port", port)
    spares = f" with spare_nodes={node.spare_nodes}" if node.spare_nodes else ""
    for name, values, truth in (
        ("nnodes", (str(size), f"{size}:{size}"), f"num_parallel={node.num_nodes}{spares}"),
        ("node-rank", (str(node.node_index),), f"current.parallel.node_index={node.node_index}"),
        # With a fixed number of nodes c10d does the same: it waits for all of them.
        ("rdzv-backend", (STATIC_BACKEND, "c10d"), "the gang's own rendezvous (static)"),
        ("master-addr", addresses, address),
        ("rdzv-endpoint", addresses, address),
        ("standalone", (None,) if size == 1 else (), f"num_parallel={size}"),
    ):
        if name in options and (value := options.pop(name)) not in values:
            said = name if value is None else f"{name}={value}"
            raise TorchrunConfigError(f"torchrun_args {said} contradicts {truth}; remove it.")


def bracketed(addr: str) -> str:
    """Return an address as it stands before a port: IPv6 in brackets."""
    return f"[{addr}]" if ":" in addr and not addr.startswith("[") else addr
