"""What ``run(outputs=..., outputs_from=...)`` may say."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.features.outputs.request import output_request


@pytest.mark.parametrize(("whose", "nodes"), [(None, [0]), ("control", [0]), ("all", [0, 1])])
def test_whose_outputs_are_stored(whose, nodes):
    request = output_request({"outputs": "a", "outputs_from": whose})
    assert (request.patterns, [node for node in (0, 1) if request.is_of(node)]) == (("a",), nodes)


def test_nothing_is_asked_for():
    assert output_request({"outputs": None, "outputs_from": None}) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"outputs": ["../model"]}, r"run\(outputs\) has '../model'"),
        ({"outputs": "a", "outputs_from": "rank0"}, r"run\(outputs_from\) is 'rank0'.*'control', 'all'"),
        ({"outputs": None, "outputs_from": "all"}, "outputs_from='all'.*outputs names none"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(given, why):
    with pytest.raises(TorchrunConfigError, match=why):
        output_request(given)
