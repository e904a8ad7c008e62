"""What users may rely on stands here; a change of it is a decision."""

import inspect
from pathlib import Path

import metaflow
import pytest

from metaflow_extensions.torchrun.plugins import mfextinit_torchrun
from metaflow_extensions.torchrun.plugins.torchrun.decorator import TorchrunDecorator
from metaflow_extensions.torchrun.plugins.torchrun.executor import TorchrunExecutor
from metaflow_extensions.torchrun.plugins.torchrun.run_arguments import NAMES, RunOptions
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU
from metaflow_extensions.torchrun.plugins.torchrun_libs import exceptions
from metaflow_extensions.torchrun.toplevel import toplevel


@pytest.mark.parametrize("name", toplevel.__all__)
def test_a_name_comes_from_metaflow(name):
    assert getattr(metaflow, name) is getattr(toplevel, name)


def test_torchrun_is_a_step_decorator_of_metaflow_and_the_only_one():
    assert [name for name, _ in mfextinit_torchrun.STEP_DECORATORS_DESC] == [TorchrunDecorator.name] == ["torchrun"]


def test_run_takes_two_arguments_by_position_and_all_that_type_checkers_know_by_name():
    _, *parameters = inspect.signature(TorchrunExecutor.run).parameters.values()
    assert [parameter.name for parameter in parameters[:2]] == ["entrypoint", "entrypoint_args"]
    assert {parameter.name for parameter in parameters[2:]} == set(RunOptions.__annotations__)
    assert {parameter.kind for parameter in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is not parameter.empty for parameter in parameters)

    assert tuple(parameter.name for parameter in parameters) == NAMES


def test_the_single_node_class_takes_the_same():
    parameters = inspect.signature(TorchrunSingleNodeMultiGPU.run).parameters
    assert tuple(parameters) == ("self", *NAMES[:2], "options")


def test_the_exceptions_of_0_2_lead_to_todays():
    assert exceptions.TorchrunException is metaflow.TorchrunError
    assert exceptions.TorchNotInstalledException is metaflow.TorchNotFoundError
    assert exceptions.AllNodesStartupTimeoutException is metaflow.GangStartTimeout
    assert exceptions.BarrierTimeoutException is metaflow.GangError


def test_the_facts_are_these_and_read_only():
    facts = {name for name, value in vars(TorchrunExecutor).items() if isinstance(value, property)}
    assert facts == {"num_nodes", "node_index", "nproc_per_node", "world_size", "main_addr", "is_control"}
    assert all(vars(TorchrunExecutor)[name].fset is None for name in facts)


@pytest.mark.parametrize("attribute", sorted(TorchrunDecorator.defaults))
def test_every_attribute_is_documented(attribute):
    assert f"\n    {attribute} : " in TorchrunDecorator.__doc__


def test_the_package_says_that_it_is_typed():
    assert (Path(toplevel.__file__).parents[1] / "py.typed").exists()
