"""What `TorchrunSingleNodeMultiGPU`, the gang of one, refuses."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun import single_node
from metaflow_extensions.torchrun.plugins.torchrun.errors import TorchrunConfigError
from metaflow_extensions.torchrun.plugins.torchrun.single_node import TorchrunSingleNodeMultiGPU
from metaflow_extensions.torchrun.plugins.torchrun.task import report


def test_a_wrong_argument_is_named_as_one_of_run(monkeypatch):
    """A single node has no step of ours, and no attributes of one."""
    monkeypatch.setattr(report, "print_errors_ourselves", lambda **_: None)
    with pytest.raises(TorchrunConfigError, match=r"^run\(max_restarts\) is -1, but "):
        TorchrunSingleNodeMultiGPU().run(["true"], warm=False, max_restarts=-1)


def test_it_is_refused_where_the_nodes_run_one_job(monkeypatch):
    monkeypatch.setattr(single_node.current, "get", {"torch": object()}.get)
    with pytest.raises(TorchrunConfigError, match=r"steps without @torchrun.*call current\.torch\.run"):
        TorchrunSingleNodeMultiGPU().run("train.py")


def test_it_needs_linux(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(TorchrunConfigError, match="TorchrunSingleNodeMultiGPU needs Linux"):
        TorchrunSingleNodeMultiGPU()
