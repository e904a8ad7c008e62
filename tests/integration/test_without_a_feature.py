"""The core does without any feature: each one's room and line are taken out of a copy, and the core's tests pass there."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = Path("metaflow_extensions/torchrun/plugins/torchrun")
FEATURES = sorted(path.parent.name for path in (ROOT / PACKAGE / "features").glob("*/__init__.py"))
# Of the unit tests those of gang, channel and node, and of what a user calls.
CORE = (
    *("cause", "history", "keepers", "protocol", "settings", "gang", "summary"),
    *("channel", "frames", "join", "registry", "relay"),
    *("command", "commands", "exits", "generation", "headlines", "logs", "node_launch"),
    *("card", "cards", "executor", "gang_store", "result", "single_node", "task_gang"),
)
# `make test` reads this file too, and so sees at once that a file here has another name.
MISSING = [name for name in CORE if not (ROOT / "tests" / "unit" / f"test_{name}.py").exists()]
assert not MISSING, f"CORE names unit tests that are not there: {MISSING}"


def list_without(feature, package):
    """Return the file that lists the features, and its text without the line of one."""
    path = package / "feature_list.py"
    lines = path.read_text().splitlines(keepends=True)
    left = [line for line in lines if f'"{feature}":' not in line]
    assert len(lines) - len(left) == 1, f"{path} has one line for {feature}"
    return path, "".join(left)


for each in FEATURES:
    list_without(each, ROOT / PACKAGE)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def copy_without(feature, folder):
    """Copy what the tests need, and take a feature out; return the names of the feature's own tests."""
    for name in ("metaflow_extensions", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    features = folder / PACKAGE / "features"
    shutil.rmtree(features / feature)
    listed, left = list_without(feature, folder / PACKAGE)
    listed.write_text(left)
    own = list((folder / "tests" / "unit").glob(f"test_{feature}_*.py"))
    for path in own:
        path.unlink()
    return [path.name for path in own]


def python_without_us(folder):
    """Return the Python of an environment that has all packages of this one but ours: Metaflow refuses two of us."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "torchrun" not in each.name:
            (packages / each.name).symlink_to(each)
    return folder / "bin" / "python"


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_passes_its_tests_without(feature, tmp_path):
    assert copy_without(feature, tmp_path)
    python, env = python_without_us(tmp_path / "venv"), {**os.environ, "PYTHONPATH": str(tmp_path)}
    ask = (
        "import metaflow_extensions.torchrun.plugins.torchrun.feature_list as it; "
        "print(it.__file__, it.in_task(), it.watches(), it.keeps(), it.on_page())"
    )
    found = subprocess.run([python, "-c", ask], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path)), found.stderr
    assert f".{feature}." not in found.stdout
    tests = [f"tests/unit/test_{name}.py" for name in CORE]
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
