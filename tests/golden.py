"""Golden files: what a page says, compared as a whole. ``pytest --renew-golden`` writes them anew; git shows the change."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "unit" / "golden"


@pytest.fixture
def golden(request):
    """Return a function that compares a text with the golden file of a name."""

    def compare(name, text):
        path = FOLDER / name
        if request.config.getoption("--renew-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), "if that is meant: pytest --renew-golden tests/unit"

    return compare
