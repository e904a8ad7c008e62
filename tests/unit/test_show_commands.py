"""The commands' help."""

import pytest
from metaflow._vendor.click.testing import CliRunner

from metaflow_extensions.torchrun.plugins.torchrun.show.commands import cli


def help_of(*words, columns=80):
    asked = CliRunner().invoke(cli, ["torchrun", *words, "--help"], terminal_width=columns)
    assert asked.exit_code == 0, asked.output
    return " ".join(asked.output.split())


@pytest.mark.parametrize("columns", [80, 50])
def test_the_help_cuts_no_sentence(columns):
    text = help_of(columns=columns)
    assert text.replace("(outputs=...)", "").count("...") == 1, text  # in the usage
    for name in ("show", "logs", "stacks", "outputs"):
        first = help_of(name).split("TASK]]] ")[1].split(". ")[0]
        assert f"{name} {first}." in text
        assert "RUN is the number of a run; default: the latest run that was started in this folder." in help_of(name)
