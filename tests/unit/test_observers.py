"""What a node observes while a generation runs: one observer that fails harms nobody."""

from types import SimpleNamespace

import pytest
from fake_node import FakeNode

from metaflow_extensions.torchrun.plugins.torchrun.supervisor import generation


@pytest.mark.parametrize("fails", ["make", "poll"])
def test_an_observer_that_raises_is_left_out_and_a_line_says_so_once(fails, tmp_path, monkeypatch):
    def maker(fails):
        def do(name, found=None):
            if name == fails:
                raise OSError("gone")
            return found

        return lambda workers: do("make", SimpleNamespace(poll=lambda: do("poll", {"is": "well"})))

    monkeypatch.setattr(generation, "_OBSERVERS", {"ill": maker(fails), "well": maker("")})
    node = FakeNode(tmp_path)
    node.launch()
    node.go()
    for _ in range(3):
        assert node.report("well") == {"is": "well"}
    assert [text for text in node.texts("note") if "ill" in text] == [
        "this node reports nothing more of its ill: OSError: gone"
    ]
    node.verdict()
