"""A comparison that finds nothing must be able to find something."""

import pytest
from sameness import Allowed, differences, shared

LONGER = Allowed("modules.*", "torch is there", lambda cold, warm: set(cold) < set(warm))


def test_the_same_has_no_differences():
    assert differences([({"a": [1, None]}, {"a": [1, None]})]) == []


@pytest.mark.parametrize(
    ("cold", "warm", "told"),
    [
        ({"a": 1}, {"a": 2}, "a: cold 1, warm 2"),
        ({"a": None}, {}, "a: cold None, warm '(absent)'"),
        ({"b": 1}, {"b": 1, "a": None}, "a: cold '(absent)', warm None"),
        ({"a": ["x", "y"]}, {"a": ["y", "z"]}, "a: lost ['x'], new ['z']"),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, "a: cold ['x', 'y'], warm ['y', 'x']"),
        ({"modules": ["x"]}, {"modules": ["y"]}, "modules: lost ['x'], new ['y']"),
    ],
)
def test_a_difference_is_told_once(cold, warm, told):
    assert differences([(cold, warm), (cold, warm), ({"modules": ["x"]}, {"modules": ["x", "y"]})], [LONGER]) == [told]


def test_an_allowed_difference_must_be_there():
    assert (
        differences([({"modules": ["x"]}, {"modules": ["x", "y"]}), ({"modules": []}, {"modules": []})], [LONGER]) == []
    )
    (told,) = differences([({"modules": ["x"]}, {"modules": ["x"]})], [LONGER])
    assert told == "allowed, but the same: modules.* (torch is there)"


def test_to_see_nothing_is_no_equality():
    with pytest.raises(AssertionError, match="nothing was seen"):
        differences([({}, {})])


def test_what_no_cold_processes_share_nobody_shares():
    cold = [{"a": 1}, {"a": 2}]
    assert shared([{"a": 3}, {"a": 4}], cold) == []
    assert shared([{"a": 3}, {"a": 3}], cold)
    assert shared([{"a": 3}, {"a": 1}], cold)
    assert shared([{"a": 3}, {"a": 3}], cold, allowed=["a"]) == []
    assert shared([{"a": 3}, {"a": 4}], cold, allowed=["a"])


def test_what_all_cold_processes_share_all_share():
    cold = [{"a": 1}, {"a": 1}]
    assert shared([{"a": 1}, {"a": 1}], cold) == []
    assert shared([{"a": 1}, {"a": 2}], cold)
