"""The arguments of one call of `run`: merged with the step's attributes, and refused where they contradict each other.

What comes after `resolve` asks none of the three sources for a setting: neither the call, nor its ``torchrun_args``, nor
the attributes. Of files it looks for `cwd` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TorchrunConfigError
from ..parsing import check_word, parse_argv, parse_folder
from ..settings import ARGUMENTS, SETTINGS, RunSettings, StepSettings
from ..supervisor.command import STATIC_BACKEND

# torchrun's options without a value, and those with a short name, from `torch/distributed/run.py` of torch 2.13. All
# others are passed on as they come; torchrun itself refuses what it does not know.
_FLAGS = frozenset({"standalone", "module", "no-python", "run-path", "virtual-local-rank", "help"})
_SHORT = {"h": "help", "m": "module", "r": "redirects", "t": "tee"}
# Settings that torchrun has as options, too, and options of which it gets the gang's own value, or none.
_SETTINGS = ("nproc_per_node", "max_restarts", "master_port")
_DECIDED = frozenset({"nproc-per-node", "max-restarts", "master-port", "module", "redirects", "tee"})
# Options that would break what a launch promises, and why.
_REFUSED = {
    "help": "torchrun would print its help and start no worker. See docs/reference.md for what it can do here.",
    "run-path": "torchrun would fork its workers from a process with threads; without it the script runs the same.",
    "virtual-local-rank": "all ranks of a node would have LOCAL_RANK 0, by which their output and their ends are told "
    "apart; set CUDA_VISIBLE_DEVICES in the script instead.",
}


@dataclass(frozen=True)
class Position:
    """Where a node stands in its gang, and where the flow lies."""

    num_nodes: int
    node_index: int
    main_addr: str
    flow_dir: str | None = None  # the folder of the flow file, if there is one


def resolve(arguments: Mapping[str, Any], settings: StepSettings, place: Position) -> RunSettings:
    """Merge and check the arguments of `run`, by name; raises TorchrunConfigError.

    The value of the call counts, else that of ``torchrun_args``, else the attribute, else the default.
    """
    options = torchrun_options(arguments.get("torchrun_args"))
    _check_options(options, place, settings.spare_nodes)
    chosen = {name: _choose(name, arguments, options, settings) for name in ARGUMENTS if name != "torchrun_args"}
    values = {name: value for name, (value, _) in chosen.items()}
    module, command = values["module"] or "module" in options, tuple[str, ...]()
    if isinstance(values["entrypoint"], list | tuple):
        command = parse_argv(values["entrypoint"], "the entrypoint")
        if module:
            raise TorchrunConfigError(
                f"module says how Python runs a script, but the entrypoint {list(command)} is a command; remove it."
            )
    values |= {"module": module, "command": command, "nproc_from": chosen["nproc_per_node"][1]}
    values["options"] = {name: value for name, value in options.items() if name not in _DECIDED}
    return RunSettings(**vars(settings) | values)


def _choose(
    name: str, arguments: Mapping[str, Any], options: Mapping[str, str | None], settings: StepSettings
) -> tuple[Any, str]:
    """Return the value of a setting that counts, None if it is not set, and where it was written."""
    given, option = {f"run({name})": arguments.get(name)}, name.replace("_", "-")
    if name in _SETTINGS:
        given[f"torchrun_args {option}"] = options.get(option)
    parsed = [(SETTINGS[name].check(value, source), source) for source, value in given.items() if value is not None]
    found = [each for each in parsed if each[0] is not None]
    if len(found) > 1 and found[0][0] != found[1][0]:
        raise TorchrunConfigError(
            f"run({name}={found[0][0]!r}) and torchrun_args {option}={found[1][0]!r} disagree; keep one of them."
        )
    value, source = found[0] if found else (getattr(settings, name), f"@torchrun({name})")
    if name == "cwd" and value is not None:  # of the attribute, the submitting machine need not have it
        value = parse_folder(value, source)
    return value, source


# --- torchrun_args --------------------------------------------------------------------------------


def torchrun_options(given: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, str | None]:
    """Return ``torchrun_args`` as a dict: hyphen spelling to value, None for a flag."""
    forms = "it must be a dict ({'max_restarts': 3}) or a list (['--max-restarts=3'])"
    given = dict_or_list(given, "torchrun_args", forms)
    options: dict[str, str | None] = {}
    for key, said in given.items() if isinstance(given, Mapping) else _pairs(list(given)):
        name = _option_name(key)
        if not name:
            raise TorchrunConfigError(f"torchrun_args {given!r} has an option without a name.")
        if name not in _FLAGS or said is not False:
            options[name] = None if _is_absent(said) or (name in _FLAGS and said is True) else str(said)
    return options


def _pairs(words: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options in a list, each with its value: ["--max-restarts=3"] and ["max-restarts", "3"] mean the same."""
    while words:
        word, equals, value = str(words.pop(0) or "").partition("=")
        if equals:
            yield word, value
        elif _option_name(word) in _FLAGS:
            if words and _is_absent(words[0]):  # metaflow-torchrun 0.2 alternates option and value
                words.pop(0)
            yield word, None
        else:  # without a value, perhaps a flag that only a newer torch knows
            yield word, words.pop(0) if words and not str(words[0]).startswith("--") else None


def _option_name(word: Any) -> str:
    name = str(word).lstrip("-").replace("_", "-")
    return _SHORT.get(name, name)


def _check_options(options: dict[str, str | None], place: Position, spare_nodes: int) -> None:
    """Drop options that say what the gang does anyway; refuse those that contradict it, or that would break a launch."""
    for name, why in _REFUSED.items():
        if name in options:
            raise TorchrunConfigError(f"torchrun_args {name} can't be used: {why}")
    size, address = place.num_nodes - spare_nodes, "the control node's address, which every node finds by itself"
    nodes = f"num_parallel={place.num_nodes}" + (f" with spare_nodes={spare_nodes}" if spare_nodes else "")
    nodes += " (all nodes take part, and max_restarts starts all workers again after a failure)"
    for name, values, truth in (
        ("nnodes", (str(size), f"{size}:{size}"), nodes),
        ("node-rank", (str(place.node_index),), f"current.parallel.node_index={place.node_index}"),
        # With a fixed number of nodes c10d does the same: it waits for all of them.
        ("rdzv-backend", (STATIC_BACKEND, "c10d"), "the gang's own rendezvous (static)"),
        ("master-addr", (place.main_addr,), address),
        ("rdzv-endpoint", (place.main_addr,), address),
        ("standalone", (None,) if size == 1 else (), f"num_parallel={size}"),
    ):
        if name in options and (value := options.pop(name)) not in values:
            said = name if value is None else f"{name}={value}"
            raise TorchrunConfigError(f"torchrun_args {said} contradicts {truth}; remove it.")


# --- entrypoint_args ------------------------------------------------------------------------------


def entrypoint_arguments(given: Mapping[str, Any] | Sequence[Any] | None) -> tuple[str, ...]:
    """Return ``entrypoint_args`` as argv words, as `TorchrunExecutor.run` tells users."""
    given = dict_or_list(given, "entrypoint_args", "it must be a dict ({'lr': 0.1}) or a list (['--lr', '0.1'])")
    if isinstance(given, Mapping):
        named = [(repr(key), word) for key, value in given.items() for word in _option_words(str(key), value)]
    else:
        named = [(str(place), str(word)) for place, word in enumerate(given)]
    return tuple(check_word(word, f"entrypoint_args[{name}]") for name, word in named)


def dict_or_list(given: Any, name: str, forms: str) -> Mapping[str, Any] | list[Any]:
    """Return `given` as a mapping or a new list, None as an empty one; what is neither is refused, with its `forms`."""
    if isinstance(given, Mapping):
        return given
    if given is None or (isinstance(given, Sequence) and not isinstance(given, (str, bytes))):
        return list(given or ())
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
        raise TorchrunConfigError(
            f"entrypoint_args[{key!r}] is a {type(value).__name__}, which a script gets as JSON, but {error}."
        ) from error


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "")
