"""The commands' help, and `show --follow` in terminals that are lower than the page."""

import pytest
from metaflow._vendor.click.testing import CliRunner

from metaflow_extensions.torchrun.plugins.torchrun.show.commands import cli
from metaflow_extensions.torchrun.plugins.torchrun.show.follow import renew, tell_again


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


@pytest.mark.parametrize("words", [(), ("show",), ("logs",), ("stacks",), ("outputs",)])
def test_the_help_says_what_a_run_is(words):
    assert "RUN is the number of a run; default: the latest run that was started in this folder." in help_of(*words)


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Return a function that makes stdout a terminal of some rows and 21 columns."""
    monkeypatch.setenv("COLUMNS", "21")

    def terminal(rows):
        monkeypatch.setenv("LINES", str(rows))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    return terminal


def test_a_low_terminal_has_the_end_of_the_first_lines(terminal, capsys):
    terminal(5)
    renew(["Failed after 9 s: Rank 3 on node 1 failed", "", "Cause", "more", "and more"])
    assert capsys.readouterr().out.replace("\x1b[K", "").replace("\x1b[H", "").replace("\x1b[J", "").splitlines() == [
        "Failed after 9 s: Ra",
        "nk 3 on node 1 faile",
        "d",
        "",
    ]


@pytest.mark.parametrize(
    ("rows", "ends", "told"),
    [
        (3, [(True, "1/a/2: well"), (False, "1/a/3: failed")], "\n1/a/3: failed\n"),
        (3, [(True, "1/a/2: well"), (True, "1/a/3: well")], "\n1/a/2: well\n1/a/3: well\n"),
        (9, [(False, "1/a/3: failed")], ""),
    ],
)
def test_below_a_page_that_has_scrolled_away_stands_what_came_of_it(rows, ends, told, terminal, capsys):
    terminal(rows)
    tell_again(["line"] * 5, ends)
    assert capsys.readouterr().out == told
