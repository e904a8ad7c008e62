"""What users may rely on stands here; a change of it is a decision."""

import inspect
import re

import metaflow
import pytest
from pages import read

from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.settings import ARGUMENTS, DEFAULTS, RunOptions
from metaflow_extensions.torchrun.plugins.torchrun.show.page import SECTION_NAMES
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU
from metaflow_extensions.torchrun.plugins.torchrun_libs import exceptions
from metaflow_extensions.torchrun.toplevel import toplevel


@pytest.mark.parametrize("name", toplevel.__all__)
def test_a_name_comes_from_metaflow(name):
    assert getattr(metaflow, name) is getattr(toplevel, name)


def test_run_takes_two_arguments_by_position_and_all_that_type_checkers_know_by_name():
    _, *parameters = inspect.signature(TorchrunExecutor.run).parameters.values()
    assert [parameter.name for parameter in parameters[:2]] == ["entrypoint", "entrypoint_args"]
    assert {parameter.name for parameter in parameters[2:]} == set(RunOptions.__annotations__)
    assert {parameter.kind for parameter in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is not parameter.empty for parameter in parameters)

    assert {parameter.name: parameter.default for parameter in parameters} == ARGUMENTS


def test_the_single_node_class_takes_the_same_and_says_so():
    ours, theirs = (cls.run for cls in (TorchrunSingleNodeMultiGPU, TorchrunExecutor))
    assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    assert parameters_in(ours.__doc__) == parameters_in(theirs.__doc__)
    assert repr(TorchrunSingleNodeMultiGPU()) == "TorchrunSingleNodeMultiGPU()"


def test_the_exceptions_of_0_2_lead_to_todays():
    assert exceptions.TorchrunException is metaflow.TorchrunError
    assert exceptions.TorchNotInstalledException is metaflow.TorchNotFoundError
    assert exceptions.AllNodesStartupTimeoutException is metaflow.GangStartTimeout
    assert exceptions.BarrierTimeoutException is metaflow.GangError


def test_the_facts_are_these_and_read_only():
    facts = {name for name, value in vars(TorchrunExecutor).items() if isinstance(value, property)}
    assert facts == {"num_nodes", "node_index", "nproc_per_node", "world_size", "main_addr", "is_control"}
    assert all(vars(TorchrunExecutor)[name].fset is None for name in facts)


def parameters_in(docstring):
    """Return the parameters that a docstring describes, in its order, each with what it says of type and default."""
    section = inspect.cleandoc(docstring).split("Parameters\n----------\n")[1].split("\n\n")[0]
    rows = re.findall(r"^(\S.*?) : (.*)$", section, re.MULTILINE)
    return {name: kind for names, kind in rows for name in names.split(", ")}


def test_the_docstrings_describe_all_settings_and_no_others_with_their_defaults():
    for doc, defaults in ((TorchrunExecutor.run.__doc__, ARGUMENTS), (TorchrunDecorator.__doc__, DEFAULTS)):
        kinds = parameters_in(doc)
        told = {name: kind.partition("default ")[2].replace('"', "'") for name, kind in kinds.items()}
        assert told == {name: repr(default) for name, default in defaults.items()}


def test_the_docstring_of_card_names_all_parts():
    named = re.search(r"Which ones: (.*)\. Default", " ".join(TorchrunExecutor.card.__doc__.split()))[1]
    assert re.findall(r'"(\w+)"', named) == list(SECTION_NAMES)
    assert [name for name in SECTION_NAMES if f'`"{name}"`' not in read("docs/seeing.md")] == []
