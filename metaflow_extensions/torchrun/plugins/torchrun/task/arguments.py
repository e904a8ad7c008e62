"""The two argument lists of one `run` call: ``entrypoint_args`` becomes argv words, ``torchrun_args`` a dict. Pure.

Options of torchrun that contradict the gang or break a launch are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TorchrunConfigError
from ..gang.group import Group
from ..parsing import check_word
from ..supervisor.command import STATIC_BACKEND, bracketed

# torchrun's options, from `torch/distributed/run.py` of torch 2.13. Options that a newer torch adds
# are passed on as they come; the table is needed for flags, short names and missing values.
_VALUED = frozenset(
    {
        *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts"),
        *("monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee"),
        *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr"),
        *("master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout"),
    }
)
_FLAGS = frozenset({"standalone", "module", "no-python", "run-path", "virtual-local-rank", "help"})
OPTIONS = _VALUED | _FLAGS
_SHORT = {"h": "help", "m": "module", "r": "redirects", "t": "tee"}


def entrypoint_arguments(given: Mapping[str, Any] | Sequence[Any] | None) -> tuple[str, ...]:
    """Return ``entrypoint_args`` as argv words, as `TorchrunExecutor.run` tells users."""
    given = dict_or_list(given, "entrypoint_args", "it must be a dict ({'lr': 0.1}) or a list (['--lr', '0.1'])")
    if isinstance(given, Mapping):
        named = [(repr(key), word) for key, value in given.items() for word in _option_words(str(key), value)]
    else:
        named = [(str(place), str(word)) for place, word in enumerate(given)]
    return tuple(check_word(word, f"entrypoint_args[{name}]") for name, word in named)


def dict_or_list(given: Any, name: str, forms: str) -> Mapping[str, Any] | list[Any]:
    """Return `given` as a mapping or a list, None as an empty one; what is neither is refused, with its `forms`."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return given
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return list(given)
    raise TorchrunConfigError(f"{name} is a {type(given).__name__}, but {forms}.")


def _option_words(key: str, value: Any) -> list[str]:
    option = key if key.startswith("-") else f"--{key}"
    if _is_absent(value):
        return [option]
    if not isinstance(value, (bool, list, tuple, dict)):
        text = str(value)
        # argparse takes a separate word such as -1e-05 for an option (before Python 3.14). Many parsers know no `-k=VALUE`.
        is_one_word = text.startswith("-") and option.startswith("--")
        return [f"{option}={text}"] if is_one_word else [option, text]
    try:
        return [option, json.dumps(value, ensure_ascii=False)]
    except (TypeError, ValueError) as error:
        raise TorchrunConfigError(f"entrypoint_args[{key!r}] can't be written as JSON: {error}.") from error


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "")


def torchrun_options(given: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, str | None]:
    """Return ``torchrun_args`` as a dict: hyphen spelling to value, None for a flag."""
    forms = "it must be a dict ({'max_restarts': 3}) or a list (['--max-restarts=3'])"
    given = dict_or_list(given, "torchrun_args", forms)
    pairs = _mapping_pairs(given) if isinstance(given, Mapping) else _list_pairs(given)
    options: dict[str, str | None] = {}
    for name, value in pairs:
        if not name:
            raise TorchrunConfigError(f"torchrun_args {given!r} has an option without a name.")
        if name in options and options[name] != value:
            raise TorchrunConfigError(f"torchrun_args sets {name} twice: {options[name]!r} and {value!r}.")
        if value is not None and name in _FLAGS:
            raise TorchrunConfigError(f"torchrun_args {name} is a flag without a value, but got {value!r}.")
        if value is None and name in _VALUED:
            raise TorchrunConfigError(f"torchrun_args {name} needs a value, but has none.")
        options[name] = value
    return options


def _option_name(word: Any) -> str:
    """Return the full name of an option: torchrun (argparse) also takes a beginning that only one option has."""
    name = str(word).lstrip("-").replace("_", "-")
    begin_so = [each for each in OPTIONS if name and each.startswith(name)]
    return _SHORT.get(name, begin_so[0] if len(begin_so) == 1 else name)


def _mapping_pairs(given: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    for key, value in given.items():
        name = _option_name(key)
        if name not in _FLAGS:
            yield name, None if _is_absent(value) else str(value)
        elif value is not False:
            yield name, None if value in (None, "", True) else str(value)


def _list_pairs(given: list[Any]) -> Iterator[tuple[str, str | None]]:
    # ["--max-restarts=3"] and ["max-restarts", "3"] mean the same.
    words = [None if word is None else str(word) for word in given]
    while words:
        word = words.pop(0)
        if not word:
            raise TorchrunConfigError(f"torchrun_args {given!r} has an empty word where an option is expected.")
        name, equals, value = word.partition("=")
        name = _option_name(name)
        if equals:
            yield name, value
        elif name in _FLAGS:
            if words and words[0] in ("", None):  # metaflow-torchrun 0.2 alternates option and value
                words.pop(0)
            yield name, None
        elif name not in _VALUED and words and str(words[0] or "").startswith("--"):
            yield name, None  # a flag that only a newer torch knows
        elif words:
            yield name, words.pop(0) or None
        else:
            raise TorchrunConfigError(f"torchrun_args {given!r}: option {name} has no value.")


# --- what the gang makes of them ------------------------------------------------------------------

# Options of torchrun (2.13) that would break what a launch promises, and why.
_REFUSED = {
    "help": "torchrun would print its help and start no worker. See docs/reference.md for what it can do here.",
    "run-path": "torchrun would fork its workers from a process with threads; without it the script runs the same.",
    "virtual-local-rank": "all ranks of a node would have LOCAL_RANK 0, by which their output and their ends are told "
    "apart; set CUDA_VISIBLE_DEVICES in the script instead.",
}


@dataclass(frozen=True)
class Position:
    """What the arguments of `run` are checked with: where this node stands in its gang."""

    num_nodes: int
    node_index: int
    main_addr: str
    flow_dir: str | None = None  # the folder of the flow file, if there is one
    spare_nodes: int = 0  # of all nodes, so many wait

    @property
    def group(self) -> Group:
        """The nodes that take part, unless some are lost before."""
        return Group(self.num_nodes - self.spare_nodes)


def options_of(given: Mapping[str, Any] | Sequence[Any] | None, place: Position) -> dict[str, str | None]:
    """Return ``torchrun_args`` as `torchrun_options` does, without what the gang does anyway; refuse what has no use."""
    options = torchrun_options(given)
    _refuse_what_has_no_use(options)
    _refuse_what_the_gang_decides(options, place)
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


def _refuse_what_the_gang_decides(options: dict[str, str | None], place: Position) -> None:
    """Drop options that say what the gang does anyway; refuse those that contradict it."""
    size, address = place.group.size, "the control node's address, which every node finds by itself"
    addresses = (place.main_addr, bracketed(place.main_addr))
    host, colon, port = (options.get("rdzv-endpoint") or "").rpartition(":")
    if colon and host in addresses:  # it says what the gang does, and pins the port
        options.pop("rdzv-endpoint")
        options.setdefault("master-port", port)
    spares = f" with spare_nodes={place.spare_nodes}" if place.spare_nodes else ""
    for name, values, truth in (
        ("nnodes", (str(size), f"{size}:{size}"), f"num_parallel={place.num_nodes}{spares}"),
        ("node-rank", (str(place.node_index),), f"current.parallel.node_index={place.node_index}"),
        # With a fixed number of nodes c10d does the same: it waits for all of them.
        ("rdzv-backend", (STATIC_BACKEND, "c10d"), "the gang's own rendezvous (static)"),
        ("master-addr", addresses, address),
        ("rdzv-endpoint", addresses, address),
        ("standalone", (None,) if size == 1 else (), f"num_parallel={size}"),
    ):
        if name in options and (value := options.pop(name)) not in values:
            said = name if value is None else f"{name}={value}"
            raise TorchrunConfigError(f"torchrun_args {said} contradicts {truth}; remove it.")
