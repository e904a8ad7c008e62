"""Scripts that are not there, in the source of a step: refused at submit, or passed over where there is a doubt."""

from types import SimpleNamespace

import pytest
from linted_flow import told_of
from unit_helpers import write

from metaflow_extensions.torchrun.plugins.torchrun.compat.graph import runs_unknown_code


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return a function that has Metaflow's lint look at a flow in a folder with some scripts; it returns what that says."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "evaluate.py", "scripts/train.py", "notes.txt"):
        write(tmp_path / name, "print()")

    def told(body, before="", attributes="", start="pass"):
        return told_of(tmp_path / "flow.py", body, before, f"@torchrun{attributes}", start)

    return told


@pytest.mark.parametrize(
    ("body", "name", "near"),
    [
        ("current.torch.run('trian.py')", "trian.py", "train.py"),
        ("current.torch.run(entrypoint='evalute.py', nproc_per_node=2)", "evalute.py", "evaluate.py"),
        (
            "for n in range(3):\n  print(n)\n  self.x = current.torch.run('trian.py', {'lr': 1 or 2})",
            "trian.py",
            "train.py",
        ),
        ("current.torch.run('scripts/trian.py', warm=False)", "scripts/trian.py", "scripts/train.py"),
        ("current.torch.run('nothing_like_it.py')", "nothing_like_it.py", ""),
        ("current.torch.run('train.py')\ncurrent.torch.run('trian.py')", "trian.py", "train.py"),
        ("current.torch.run('trian.py')\ncurrent.torch.run('trian.py', {'n': 2})", "trian.py", "train.py"),
    ],
)
def test_a_missing_script_is_told_with_the_folder_and_a_similar_name(body, name, near, told, tmp_path):
    message, line = told(body)
    assert message.startswith(
        f"Step *train* calls current.torch.run({name!r}), but there is no such file in {tmp_path}"
    )
    assert message.endswith("give its name in a variable: that is checked only when the step runs.")
    assert (f" Did you mean {near}? " in message) if near else ("Did you mean" not in message)
    assert name in line


def test_a_flow_that_is_resumed_may_take_the_step_from_the_run_before(told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["flow.py", "--no-pylint", "resume", "end"])
    assert told("current.torch.run('trian.py')") is None


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("current.torch.run('train.py')", {}),
        ("current.torch.run('scripts/train.py')", {}),
        ("current.torch.run('trian')", {"before": "# trian is made by hand"}),
        ("current.torch.run('trian', module=True)", {}),
        ("current.torch.run('trian.py', cwd='/elsewhere')", {}),
        ("current.torch.run('trian.py', before_run=['make trian'])", {}),
        ("current.torch.run('trian.py', torchrun_args=['--no-python'])", {}),
        ("current.torch.run('trian.py', **self.more)", {}),
        ("current.torch.run(*self.args)", {}),
        ("current.torch.run(['trian.py'])", {}),
        ("current.torch.run(train)", {"before": "def train(): ..."}),
        ("current.torch.run(self.script)", {}),
        ("current.torch.run({}, 'trian.py')", {}),
        ("current.torch.run('')", {}),
        ("current.torch.run('/opt/trian.py')", {}),
        ("current.torch.run('../trian.py')", {}),
        ("current.torch.run('a_clone/trian.py')", {}),
        ("current.torch.run('trian.py')", {"attributes": "(cwd='/elsewhere')"}),
        ("current.torch.run('trian.py')", {"attributes": "(before_run=['make trian'])"}),
        ("current.torch.run('trian.py')", {"start": "open('trian.py', 'w')"}),
        ("current.torch.run('trian.py')", {"start": "import zipfile; zipfile.ZipFile('code.zip').extractall()"}),
        ("import os\nos.chdir('scripts')\ncurrent.torch.run('trian.py')", {}),
        ("self.fetch('.')\ncurrent.torch.run('trian.py')", {}),
        ("open(self.name, 'w').write('')\ncurrent.torch.run('trian.py')", {}),
        ("if self.x:\n    current.torch.run('trian.py')", {}),
        ("self.x and current.torch.run('trian.py')", {}),
        ("try:\n    current.torch.run('trian.py')\nexcept Exception:\n    pass", {}),
        ("def again():\n    current.torch.run('trian.py')", {}),
        ("other.torch.run('trian.py')", {}),
    ],
)
def test_what_may_be_there_when_the_step_runs_is_passed_over(body, more, told):
    assert told(body, **more) is None


def test_a_name_in_another_file_beside_the_flow_is_passed_over(told, tmp_path):
    assert told("current.torch.run('trian.py')") is not None
    write(tmp_path / "tools.py", "def make(): open('trian.py', 'w')")
    assert told("current.torch.run('trian.py')") is None


def test_decorators_that_may_run_anything_are_known():
    def graph(module, wrappers=()):
        decorator = type("Deco", (), {"__module__": module})()
        return {"train": SimpleNamespace(decorators=[decorator], wrappers=list(wrappers))}

    assert not runs_unknown_code(graph("metaflow.plugins.resources_decorator"), "train")
    assert runs_unknown_code(graph("metaflow_extensions.ours.plugins.git"), "train")
    assert runs_unknown_code(graph("metaflow.plugins.resources_decorator", ["a user's"]), "train")
