"""Every message becomes bytes below the limit, and says as much as they can hold."""

import pytest
from unit_helpers import HOSTILE

from metaflow_extensions.torchrun.plugins.torchrun.failure import Cause
from metaflow_extensions.torchrun.plugins.torchrun.frames import LENGTH, MAX_FRAME_BYTES, decode, encode, length_of


def sent(message):
    """Return what arrives of a message."""
    data = encode(message)
    head, body = data[: LENGTH.size], data[LENGTH.size :]
    assert length_of(head) == len(body) <= MAX_FRAME_BYTES
    return decode(body)


@pytest.mark.parametrize("text", [*HOSTILE, "half of a pair: \udce4", "\ud83d", "\x00\x1f\u2028"])
def test_texts_arrive_as_they_were(text):
    assert sent({"type": "note", "text": text, text: [text]}) == {"type": "note", "text": text, text: [text]}


@pytest.mark.parametrize("character", ["🙂", "\x00", "\ud83d", "x"], ids=["emoji", "control", "half a pair", "plain"])
def test_a_report_of_eight_long_causes_needs_no_shortening(character):
    causes = [Cause("exception", 1, "h", i, i, 1, character * 10**6, character * 10**6).to_wire() for i in range(8)]
    report = {"type": "ended", "causes": [{"cause": cause, "age_s": 0.1} for cause in causes]}
    assert sent(report) == report


def test_what_is_too_long_is_shortened_and_still_says_what_it_is():
    detail = "Traceback (most recent call last):\n" + "🙂" * 10**6 + "\nValueError: at the end"
    causes = [{"cause": {"kind": "exception", "rank": rank, "detail": detail}, "age_s": 0.5} for rank in range(8)]
    arrived = sent({"type": "ended", "ok": False, "ended_well": list(range(1000)), "causes": causes})
    assert [entry["cause"]["rank"] for entry in arrived["causes"]] == list(range(8))
    assert arrived["ended_well"] == list(range(1000))
    text = arrived["causes"][0]["cause"]["detail"]
    assert text.startswith("Traceback (most recent call last):\n🙂")
    assert text.endswith("🙂\nValueError: at the end")
    assert "characters left out]" in text


def test_of_too_many_causes_the_first_are_kept():
    arrived = sent(
        {"type": "ended", "causes": [{"cause": {"rank": rank, "detail": "x" * 2000}} for rank in range(5000)]}
    )
    assert [entry["cause"]["rank"] for entry in arrived["causes"]] == list(range(8))


def test_what_can_not_be_shortened_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a 'ended' message of \d+ bytes is over the limit of 1048576"):
        encode({"type": "ended", "deposits": {str(rank): "k" * 100 for rank in range(20_000)}})


@pytest.mark.parametrize("data", [b"[]", b"", b"\xff\xfe{}", b"null", b"[" * 500_000, b'{"a": '])
def test_what_is_no_message_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_a_frame_over_the_limit_is_named():
    with pytest.raises(ValueError, match="a frame of 1048577 bytes is over the limit of 1048576"):
        length_of(LENGTH.pack(MAX_FRAME_BYTES + 1))
