"""What a stack of faulthandler says, and who probably waits for whom."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.machine.frames import (
    Found,
    look_first,
    read,
    without_stack,
)
from metaflow_extensions.torchrun.plugins.torchrun.machine.stacks import source_line

SITE = "/venv/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"


def stack(*frames):
    return "Current thread (most recent call first):\n" + "\n".join(
        f'  File "{path}", line {line} in {function}' for path, line, function in frames
    )


def test_frames_of_libraries_are_counted_and_the_users_have_their_source_lines():
    text = stack(
        (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
        (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        ("/my/train.py", 18, "step"),
        (f"{SITE}/trainer/loop.py", 7, "fit"),
        (f"{TORCH}/nn/module.py", 9, "call"),
        ("/my/train.py", 24, "<module>"),
        ("<frozen runpy>", 88, "_run_code"),
    )
    lines = {("/my/train.py", 18): "dist.all_reduce(x)", ("/my/train.py", 24): "fit()"}
    found = read(text, lambda *at: lines.get(at, ""))
    assert found.short.splitlines() == [
        "(2 frames of libraries, innermost distributed_c10d.py:3252 in all_reduce)",
        "train.py:18 in step: dist.all_reduce(x)",
        "loop.py:7 in fit",
        "(1 frame of libraries, innermost module.py:9 in call)",
        "train.py:24 in <module>: fit()",
    ]
    assert (found.where, found.line) == ("train.py:18 in step (in all_reduce)", "dist.all_reduce(x)")
    assert (found.text, found.waits) == (text, True)


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/metaflow/model.py", True),
        ("/home/me/metaflow/my/model.py", True),
        ("/metaflow/metaflow/plugins/datatools/s3/s3.py", False),  # in a pod, up to 2.15
        ("/metaflow/.mf_code/metaflow/plugins/datatools/s3/s3.py", False),
        ("/metaflow/.mf_code/metaflow_extensions/other/plugins/x.py", False),
        (f"{SITE}/metaflow/plugins/datatools/s3/s3.py", False),
    ],
)
def test_files_of_metaflow_are_not_the_users_also_in_a_pod(path, is_own):
    assert read(stack((path, 3, "get"), ("/my/train.py", 5, "<module>"))).where.startswith("train.py:5") is not is_own


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", True),
        (f"{TORCH}/nn/parallel/distributed.py", True),
        (f"{TORCH}/autograd/graph.py", True),
        (f"{TORCH}/cuda/__init__.py", True),
        (f"{TORCH}/distributions/normal.py", False),
        (f"{TORCH}/distributed/checkpoint/filesystem.py", False),
        ("/my/torch/distributed/x.py", False),
        ("/usr/lib/python3.11/selectors.py", False),
    ],
)
def test_only_the_innermost_frame_tells_that_a_rank_waits_for_others(path, waits):
    outer = (f"{TORCH}/distributed/fsdp/api.py", 1, "forward")
    assert read(stack((path, 1, "f"), outer, ("/my/train.py", 2, "main"))).waits is waits


def test_a_wait_in_c_is_seen_by_its_source_line():
    text = stack(("/my/train.py", 2, "main"))
    assert read(text, lambda path, number: "work.wait()").waits
    assert not read(text, lambda path, number: "time.sleep(9)").waits
    inner = stack(("/usr/lib/python3.11/threading.py", 1, "wait"), ("/my/train.py", 2, "main"))
    assert not read(inner, lambda path, number: "event.wait()").waits, "of this process alone"


def test_what_is_sent_is_bounded():
    found = read(stack(*[("/my/tü.py", line, "f") for line in range(1, 101)]))
    assert found.bounded(10_000) == found
    cut = found.bounded(60)
    assert [text.partition("\n… ")[0] for text in (cut.text, cut.short)] == [found.text[:60], found.short[:60]]
    assert cut.short.endswith(f"… {len(found.short) - 60} characters are left out here")


def test_equal_stacks_have_equal_marks():
    first, second, other = (read(stack(("/my/t.py", line, "f"))) for line in (1, 1, 2))
    assert first.mark == second.mark != other.mark
    assert read("Current thread (most recent call first):\n  <no Python frame>").where == "no Python frame"
    assert read(stack(("/my/t.py", "???", "f"))).where == "t.py:??? in f"


WAITS, ALSO = (Found(f"t.py:{line} in f", "m", "", waits=True) for line in (1, 3))
BUSY, OTHER = (Found(f"t.py:{line} in f", "m", "") for line in (2, 4))
GONE = without_stack("it is stopped")


@pytest.mark.parametrize(
    ("ranks", "first", "why"),
    [
        ([WAITS, WAITS, BUSY], [2], "the others seem to wait"),
        ([WAITS, GONE, BUSY, WAITS], [1, 2], "the others seem to wait"),
        ([BUSY, BUSY, WAITS], [], ""),  # they may wait in C++
        ([WAITS, WAITS, ALSO], [2], "most ranks are at another place"),  # another collective
        ([BUSY, OTHER, BUSY], [1], "most ranks are at another place"),
        ([WAITS, ALSO], [], ""),
        ([WAITS] * 4, [], ""),
        ([], [], ""),
    ],
)
def test_who_is_to_be_looked_at_first(ranks, first, why):
    found, because = look_first(dict(enumerate(ranks)))
    assert (found, because.startswith(why), bool(because)) == (first, True, bool(first))


# --- source lines ------------------------------------------------------------------------------------


def test_source_lines_are_read_where_they_can_be(tmp_path):
    source = tmp_path / "träin.py"
    source.write_text("o\x1bn\te\n\n   two = 3  \r\n" + "x" * 999, encoding="utf-8")
    lines = [source_line(str(source), number) for number in (1, 2, 3, 4, 99)]
    assert lines == ["o n e", "", "two = 3", "x" * 160 + "…", ""]
    assert [source_line(str(path), 1) for path in (tmp_path, tmp_path / "none")] == ["", ""]
