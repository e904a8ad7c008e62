"""``entrypoint_args`` and ``torchrun_args``: what may be written, and what it means."""

import copy
from pathlib import Path
from types import MappingProxyType

import pytest
from unit_helpers import HOSTILE

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.task.arguments import entrypoint_arguments, torchrun_options

# --- entrypoint_args ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ("--key",)),
        ("", ("--key",)),
        (True, ("--key", "true")),
        (False, ("--key", "false")),
        (1e-05, ("--key", "1e-05")),
        (-1e-05, ("--key=-1e-05",)),
        (-3, ("--key=-3",)),
        ("-O2 --fast", ("--key=-O2 --fast",)),
        ("-", ("--key=-",)),
        ([-1, "-a"], ("--key", '[-1, "-a"]')),
        ([1, "a"], ("--key", '[1, "a"]')),
        ((1, None), ("--key", "[1, null]")),
        ({"a": {"b": 'say "hi"'}}, ("--key", '{"a": {"b": "say \\"hi\\""}}')),
        (["größe"], ("--key", '["größe"]')),
        *((each, ("--key", each)) for each in HOSTILE if each and not each.startswith("-")),
        (Path("/a b"), ("--key", "/a b")),
    ],
)
def test_a_dict_of_arguments_becomes_options(value, words):
    assert entrypoint_arguments({"key": value}) == words
    assert entrypoint_arguments({"-k": -1, "--b": 2, "key": value}) == ("-k", "-1", "--b", "2", *words)


@pytest.mark.parametrize("given", [HOSTILE, ("--n", 3, 0.5), None, {}])
def test_a_list_of_arguments_is_passed_as_it_is(given):
    assert entrypoint_arguments(given) == tuple(map(str, given or ()))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *((wrong, r"entrypoint_args is a .* dict .* or a list") for wrong in ("--lr 0.1", b"--lr", 3, {1, 2})),
        *((wrong, "NUL") for wrong in ({"k": "a\0b"}, {"a\0b": 1}, ["a\0b"])),
        ({"a": 1, "notes": "é" * 70_000}, r"entrypoint_args\['notes'\] has 140000 bytes, .* Write it to a file"),
        (["--n", "x" * 131_072], r"entrypoint_args\[1\] has 131072 bytes, but Linux gives a process at most 131071"),
        ({"when": [object()]}, r"entrypoint_args\['when'\]"),  # JSON can't hold it
    ],
)
def test_arguments_that_can_not_be_are_refused_with_the_reason(wrong, why):
    with pytest.raises(TorchrunConfigError, match=why):
        entrypoint_arguments(wrong)


# --- torchrun_args -----------------------------------------------------------------------------


AN_OPTION = [
    *({key: 3} for key in ("max_restarts", "max-restarts", "--max_restarts")),
    {"max_restarts": 3, "max-restarts": "3"},
    *([word] for word in ("--max-restarts=3", "--max_restarts=3")),
    *(["--max-restarts", "3"], ["max_restarts", 3], ("--max-restarts=3", "--max_restarts", "3")),
]
A_FLAG = [
    *({"no_python": None}, {"no-python": ""}, {"no_python": True}),
    *(["--no-python"], ["no_python", ""], ["no-python", None]),
]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        *((spelling, {"max-restarts": "3"}) for spelling in AN_OPTION),
        *((spelling, {"no-python": None}) for spelling in A_FLAG),
        (None, {}),
        ({"no_python": False, "module": False}, {}),
        # As metaflow-torchrun 0.2 has it.
        (
            ["--standalone", "", "max-restarts", "3", "module", None, "rdzv_id", "a b"],
            {"standalone": None, "max-restarts": "3", "module": None, "rdzv-id": "a b"},
        ),
        # A flag does not swallow the next option, even one that only a newer torch has.
        (["--no-python", "--max-restarts=3"], {"no-python": None, "max-restarts": "3"}),
        (["--brand-new", "--max-restarts=3"], {"brand-new": None, "max-restarts": "3"}),
        (["brand_new", 3, "--another"], {"brand-new": "3", "another": None}),
        (["-m", "-r=3", "-t=1"], {"module": None, "redirects": "3", "tee": "1"}),
        (["--rdzv-conf=a=1,b=2"], {"rdzv-conf": "a=1,b=2"}),
        (["--role=3", "-t=1", "tee", "2", "--role=4"], {"role": "4", "tee": "2"}),  # the last counts, as for torchrun
    ],
)
def test_options_are_read_from_dicts_and_lists(given, options):
    assert torchrun_options(given) == options


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *((other, "torchrun_args is a") for other in ("--max-restarts=3", 3, b"x")),
        *((nameless, "an option without a name") for nameless in (["", "3"], ["--=x"], {"--": None})),
    ],
)
def test_what_can_not_be_meant_is_refused_with_the_reason(wrong, why):
    with pytest.raises(TorchrunConfigError, match=why):
        torchrun_options(wrong)


@pytest.mark.parametrize("read", [entrypoint_arguments, torchrun_options])
@pytest.mark.parametrize(
    "mine", [{"max_restarts": 3, "flag": None, "nested": ["x"]}, ["--standalone", "", "role", "3"]]
)
def test_the_callers_arguments_are_never_changed(read, mine):
    before = copy.deepcopy(mine)
    read(MappingProxyType(mine) if isinstance(mine, dict) else mine)
    assert mine == before
