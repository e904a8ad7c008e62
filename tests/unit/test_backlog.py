"""Lines that wait for another node's log: in order, bounded, and what is left out is counted."""

from hypothesis import given
from hypothesis import strategies as st

from metaflow_extensions.torchrun.plugins.torchrun.channel.backlog import Backlog, Limits
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import MAX_FRAME_BYTES, encode

TEXTS = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(1, 2000), st.integers(0, 30)), max_size=30
)


def taken(backlog):
    return list(iter(backlog.take, None))


@given(TEXTS)
def test_every_line_is_there_in_order_or_is_counted_where_it_is_missing(texts):
    backlog, number = Backlog(20_000), 0
    for stream, count, width in texts:
        text = "".join(f"{number + each} {'x' * width}\n" for each in range(count))
        backlog.add(stream, text)
        number += count
    expected = 0
    for lines in taken(backlog):
        expected += lines.left_out
        numbers = [[int(line.split()[0]) for line in text.splitlines()] for text in (lines.stdout, lines.stderr)]
        assert numbers == [sorted(each) for each in numbers]
        begin, expected = expected, expected + sum(map(len, numbers))
        assert sorted(numbers[0] + numbers[1]) == list(range(begin, expected))
    assert expected == number


def test_two_streams_share_a_message():
    backlog = Backlog(10**6)
    for number in range(300):
        backlog.add("stderr" if number % 2 else "stdout", f"{number}\n")
    (lines,) = taken(backlog)
    assert lines.stdout.split() == [str(number) for number in range(0, 300, 2)]
    assert lines.stderr.split() == [str(number) for number in range(1, 300, 2)]


def test_no_stdout_comes_within_a_block_on_stderr_that_takes_two_messages():
    """Of a message, stdout is written first."""
    backlog, block = Backlog(10**6), [f"  File {number} {'x' * 80}" for number in range(500)]
    backlog.add("stdout", "before\n")
    backlog.add("stderr", "\n".join(block) + "\n")
    backlog.add("stdout", "after\n")
    written = "".join(lines.stdout + lines.stderr for lines in taken(backlog))
    assert written.splitlines() == ["before", *block, "after"]


def test_of_too_many_the_oldest_go():
    backlog = Backlog(100)
    for number in range(50):
        backlog.add("stdout", f"line {number}\n")
    (lines,) = taken(backlog)
    assert lines.stdout.endswith("line 48\nline 49\n")
    assert lines.left_out + lines.stdout.count("\n") == 50
    assert 80 <= len(lines.stdout) <= 100


def test_what_was_missing_before_stays_counted():
    backlog = Backlog(30)
    backlog.add("stdout", "a\n" * 5, left_out=7)
    backlog.add("stdout", "b\n" * 14, left_out=3)
    assert [(each.stdout, each.left_out) for each in taken(backlog)] == [("b\n" * 14, 15)]


def test_a_gap_stays_between_the_lines_that_it_is_between():
    backlog = Backlog(10**6)
    backlog.add("stdout", "a\n")
    backlog.add("stdout", "b\n")
    backlog.add("stdout", "c\n", left_out=3)
    assert [(each.stdout, each.left_out) for each in taken(backlog)] == [("a\nb\n", 0), ("c\n", 3)]


def test_of_a_long_line_the_begin_is_kept():
    backlog = Backlog(10**6)
    backlog.add("stdout", "short\n" + "x" * 300_000 + "\nafter\n")
    text = "".join(lines.stdout for lines in taken(backlog))
    assert text == f"short\n{'x' * 8192}… [{300_001 - 8192} characters are left out here]\nafter\n"


def test_a_message_is_far_below_the_limit_of_a_frame_whatever_stands_in_it():
    backlog = Backlog(10**7)
    for character in ("\x00", "🙂", "\ud83d", "x"):
        backlog.add("stdout", (character * 60 + "\n") * 5000)
    sizes = [len(encode(lines)) for lines in taken(backlog)]
    assert max(sizes) < MAX_FRAME_BYTES / 4
    assert len(sizes) < 60


def test_the_limits_hold_for_gangs_of_any_size():
    for nodes in (2, 8, 64, 256, 4000):
        limits = Limits.for_gang(nodes)
        assert nodes / limits.pause_s <= 400  # messages a second at the control node
        assert nodes * limits.chars_per_s <= 4 * 1024**2
        assert nodes * limits.waiting_chars <= 128 * 1024**2
        assert limits.chars_per_s * limits.pause_s < limits.waiting_chars  # else lines that may go are left out
    assert Limits.for_gang(2).pause_s == 0.5
    assert 8 / Limits.for_gang(8).pause_s <= 4  # a small gang's messages wake its control node seldom
