"""Scripts that are not there, in the source of a step: told of at submit, or passed over where there is a doubt."""

import pytest
from linted_flow import told_of
from unit_helpers import write


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """Return a function that has Metaflow's lint look at a flow in a folder with some scripts; it returns what is written."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "evaluate.py", "scripts/train.py", "notes.txt"):
        write(tmp_path / name, "print()")

    def told(body, before="", attributes=""):
        assert told_of(tmp_path / "flow.py", body, before, f"@torchrun{attributes}") is None, "nothing is refused"
        return capsys.readouterr().err

    return told


@pytest.mark.parametrize(
    ("body", "name", "near"),
    [
        ("current.torch.run('trian.py')", "trian.py", "train.py"),
        ("if self.x:\n    self.x = current.torch.run('trian.py', {'lr': 1 or 2})", "trian.py", "train.py"),
        ("current.torch.run('nothing_like_it.py')", "nothing_like_it.py", ""),
        ("current.torch.run('trian.py')\ncurrent.torch.run('trian.py', {'n': 2})", "trian.py", "train.py"),
    ],
)
def test_a_missing_script_is_told_once_with_the_folder_and_a_similar_name(body, name, near, told, tmp_path):
    (line,) = told(body).splitlines()
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
        ("current.torch.run('trian.py')", {"attributes": "(cwd='/elsewhere')"}),
        ("current.torch.run('trian.py')", {"attributes": "(before_run=['make trian'])"}),
    ],
)
def test_what_may_be_elsewhere_when_the_step_runs_is_passed_over(body, more, told):
    assert told(body, **more) == ""
