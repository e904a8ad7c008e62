"""What torchrun's own elasticity takes, where it is asked for."""

from __future__ import annotations

from .devices import parse_int
from .errors import TorchrunConfigError

BACKEND = "c10d"


def take_min_nodes(options: dict[str, str | None], num_nodes: int) -> int | None:
    """Take torchrun's own elasticity out of ``torchrun_args`` and return how few nodes it may go on with.

    Returns
    -------
    int or None
        None is the rule: without ``rdzv_backend="c10d"`` the gang is of a fixed size.

    Raises
    ------
    TorchrunConfigError
        If ``nnodes`` is a range without that backend, or contradicts the gang's size.
    """
    nnodes = options.get("nnodes") or str(num_nodes)
    low, _, high = nnodes.rpartition(":")
    if options.get("rdzv-backend") != BACKEND:
        if low and low != high:
            raise TorchrunConfigError(
                f"torchrun_args nnodes={nnodes} asks for a gang of changing size, but num_parallel={num_nodes} fixes it: "
                "all nodes start together, and a failure stops or restarts all of them. Remove nnodes, or, for torchrun's "
                "own elasticity, add rdzv_backend='c10d'; docs/elastic.md says what Metaflow makes of it."
            )
        return None
    fewest, most = parse_int(low or high), parse_int(high)
    if fewest is None or most != num_nodes or not 1 <= fewest <= num_nodes:
        raise TorchrunConfigError(
            f"torchrun_args nnodes={nnodes} contradicts num_parallel={num_nodes}; with rdzv_backend='c10d' it may be "
            f"MIN:{num_nodes}, with MIN from 1 to {num_nodes}."
        )
    options.pop("rdzv-backend")
    options.pop("nnodes", None)
    return fewest


def rendezvous_settings(given: str | None, is_host: bool, timeout_s: int) -> str:
    """Return ``rdzv-conf``: what the user gave, and who hosts the store and how long agents wait.

    By default c10d (``c10d_rendezvous_backend.py`` and ``dynamic_rendezvous.py`` in
    ``torch/distributed/elastic/rendezvous``, torch 2.13) guesses the host from its names, waits 60 s for a
    connection and 600 s for the other agents.
    """
    settings = {"read_timeout": str(timeout_s), "join_timeout": str(timeout_s)}
    for entry in (given or "").split(","):
        key, equals, value = entry.strip().partition("=")
        if equals:
            settings[key] = value
    settings["is_host"] = "true" if is_host else "false"
    return ",".join(f"{key}={value}" for key, value in settings.items())
