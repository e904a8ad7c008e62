"""Arguments that `run` does not have and scripts that are not there, in a step's source: found, or passed over in doubt."""

import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from metaflow import lint
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.submit import run_calls

FLOW = """
from metaflow import FlowSpec, current, step, torchrun
{before}

class LintedFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    {decorator}
    @step
    def train(self):
        {body}
        self.next(self.join)

    @step
    def join(self, inputs):
        self.next(self.end)

    @step
    def end(self):
        pass
"""


def told_of(path, body, before="", decorator="@torchrun"):
    """Return what the lint says of a flow in this file, and the line that it says it of; None if it says nothing."""
    text = FLOW.format(body=body.replace("\n", "\n" + " " * 8), before=before, decorator=decorator)
    spec = importlib.util.spec_from_file_location("linted_flow_of_a_test", write(path, text))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        lint.linter.run_checks(module.LintedFlow._graph)
    except lint.LintWarn as warning:
        return warning.message, text.splitlines()[warning.line_no - 1].strip()
    return None


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that has Metaflow's lint look at a flow; it returns what that says and the line it says it of."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.py", "y.py", "train.py", "scripts/train.py", "notes.txt"):
        write(tmp_path / name, "")
    return partial(told_of, tmp_path / "größe of * 🙂.py", decorator="@torchrun(nproc_per_node=2)\n")


@pytest.mark.parametrize(
    ("body", "before", "name"),
    [
        ("current.torch.run('x.py', timeout=3)", "", "timeout"),
        ("current.torch.run(\n  'x.py',\n  gather=True,\n  gathr=True,\n)", "", "gathr"),
        ("if self.x:\n    self.result = current.torch.run('x.py', **self.more, gathr=True)", "", "gathr"),
        ("self.run = current.torch.run('x.py', größe=1)", "", "größe"),
    ],
)
def test_a_misspelt_argument_is_found(body, before, name, told):
    message, line = told(body, before)
    assert message.startswith(f"Step *train* calls current.torch.run({name}=...), which has no argument {name}. ")
    assert ("Did you mean " in message) is (name != "größe")
    assert f"{name}=" in line


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("current.torch.run('x.py', gather=True, local_output_dir='x')", ""),
        ("current.torch.run('x.py', **{'gathr': 1})", ""),
        ("torch.run('x.py', gathr=1)", "import torch"),
        ("current = self.mine\ncurrent.torch.run('x.py', gathr=1)", ""),
        ("for current in self.mine:\n    current.torch.run('x.py', gathr=1)", ""),
        ("current.torch.run(gathr=1)", "from mine import current"),
        ("pass", "def train():\n    current.torch.run(gathr=1)"),
    ],
)
def test_what_may_mean_something_else_is_passed_over(body, before, told, monkeypatch):
    for name in ("torch", "mine"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(current=None, __all__=[]))
    assert told(body, before) is None


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("current.torch.run('x.py', nproc_per_node=2)", 2),
        ("current.torch.run('x.py', nproc_per_node=2); current.torch.run('y.py', nproc_per_node=2)", 2),
        ("current.torch.run('x.py', nproc_per_node=2); current.torch.run('y.py', nproc_per_node=3)", None),
        ("current.torch.run('x.py', nproc_per_node=self.n)", None),
        ("current.torch.run('x.py')", None),
    ],
)
def test_the_number_of_processes_is_known_where_all_calls_name_the_same(body, number, tmp_path):
    path = write(tmp_path / "flow.py", f"from metaflow import current\ndef train(self):\n    {body}\n")
    node = SimpleNamespace(name="train", decorators=[SimpleNamespace(name="torchrun")])
    node.source_file, node.func_lineno = str(path), 2
    other = SimpleNamespace(name="other", decorators=node.decorators, source_file=str(path), func_lineno=2)
    assert run_calls.nproc_in_calls([node], "train") == number
    assert run_calls.nproc_in_calls([other], "train") is None


@pytest.mark.parametrize(
    "body",
    [
        "current.torch.run('x.py')",
        "def again():\n    current.torch.card()\nagain()",
    ],
)
def test_current_torch_in_a_step_without_torchrun_is_refused(body, told):
    message, line = told(body, decorator="")
    assert message.startswith("Step *train* uses current.torch, but has no @torchrun. Add @torchrun to this step, ")
    assert "current.torch" in line


@pytest.mark.parametrize(
    "body",
    [
        "if 'torch' in current:\n    current.torch.run('x.py')",
        "if self.x:\n    print(current.torch.num_nodes)",
        "hasattr(current, 'torch') and current.torch.run('x.py')",
        "try:\n    current.torch.run('x.py')\nexcept AttributeError:\n    pass",
        "try:\n    current.torch.run('x.py')\nexcept:\n    pass",
        "self.current.torch.run('x.py')",
    ],
)
def test_a_step_that_can_do_without_current_torch_is_passed_over(body, told):
    assert "current.torch" not in (told(body, decorator="") or [""])[0]


# --- scripts that are not there -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "name", "near"),
    [
        ("current.torch.run('trian.py')", "trian.py", "train.py"),
        ("if self.x:\n    self.x = current.torch.run('trian.py', {'lr': 1 or 2})", "trian.py", "train.py"),
        ("current.torch.run('nothing_like_it.py')", "nothing_like_it.py", ""),
        ("current.torch.run('trian.py')\ncurrent.torch.run('trian.py', {'n': 2})", "trian.py", "train.py"),
    ],
)
def test_a_missing_script_is_told_once_with_the_folder_and_a_similar_name(body, name, near, told, tmp_path, capsys):
    assert told(body) is None, "nothing is refused"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"[torchrun] Step train calls current.torch.run({name!r}), but there is no such file in {tmp_path} "
    )
    assert line.endswith("If the flow does not write it before, the step will fail.")
    assert (f" Did you mean {near}? " in line) if near else ("Did you mean" not in line)


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("current.torch.run('train.py')", {}),
        ("current.torch.run('trian', module=True)", {}),
        ("current.torch.run('trian.py', cwd='/elsewhere')", {}),
        ("current.torch.run('trian.py', before_run=['make trian'])", {}),
        ("current.torch.run('trian.py', torchrun_args=['--no-python'])", {}),
        ("current.torch.run('trian.py', **self.more)", {}),
        ("current.torch.run(train)", {"before": "def train(): ..."}),
        ("current.torch.run(self.script)", {}),
        ("current.torch.run('/opt/trian.py')", {}),
        ("current.torch.run('trian.py')", {"decorator": "@torchrun(cwd='/elsewhere')"}),
        ("current.torch.run('trian.py')", {"decorator": "@torchrun(before_run=['make trian'])"}),
    ],
)
def test_what_may_be_elsewhere_when_the_step_runs_is_passed_over(body, more, told, capsys):
    assert told(body, **more) is None
    assert capsys.readouterr().err == ""
