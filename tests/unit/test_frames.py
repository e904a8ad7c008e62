"""Every message becomes bytes below the limit, and says as much as they can hold."""

import json

import pytest
from unit_helpers import HOSTILE

from metaflow_extensions.torchrun.plugins.torchrun.channel.codec import LENGTH, Frames, load
from metaflow_extensions.torchrun.plugins.torchrun.channel.frames import (
    MAX_FRAME_BYTES,
    decode,
    encode,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.protocol import Ended, Note, Restart, Told, to_wire


def sent(message):
    """Return what arrives of a message."""
    (value,) = Frames(MAX_FRAME_BYTES).feed(encode(message))
    return decode(value)


@pytest.mark.parametrize("text", [*HOSTILE, "half of a pair: \udce4", "\ud83d", "\x00\x1f\u2028"])
def test_texts_arrive_as_they_were(text):
    assert sent(Note(text)) == Note(text)


@pytest.mark.parametrize("character", ["🙂", "\x00", "\ud83d", "x"], ids=["emoji", "control", "half a pair", "plain"])
def test_a_report_of_eight_long_causes_needs_no_shortening(character):
    causes = [Cause("exception", 1, "h", i, i, 1, character * 10**6, character * 10**6) for i in range(8)]
    arrived = sent(Ended(0, False, 0, tuple(Failure(cause, 0.1) for cause in causes)))
    assert arrived.failures == tuple(Failure(cause.bounded(), 0.1) for cause in causes)


def test_what_is_too_long_is_shortened_and_still_says_what_it_is():
    long = "Traceback (most recent call last):\n" + "🙂" * 10**6 + "\nValueError: at the end"
    arrived = sent(Told(0, 0, "any", {"codes": {str(code): 0 for code in range(1000)}, "where": {"3": long}}))
    assert len(arrived.data["codes"]) == 1000
    text = arrived.data["where"]["3"]
    assert text.startswith("Traceback (most recent call last):\n🙂")
    assert text.endswith("🙂\nValueError: at the end")
    assert "characters left out]" in text


def test_of_too_many_causes_the_first_and_the_last_are_kept():
    failures = tuple(Failure(Cause("exception", 1, "h", rank, detail="x" * 2000)) for rank in range(5000))
    ranks = [failure.cause.rank for failure in sent(Ended(0, False, 0, failures)).failures]
    assert ranks == [*range(150), *range(4850, 5000)]


def test_what_can_not_be_shortened_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'told' message of \d+ .* 1048576"):
        encode(Told(0, 0, "some", dict.fromkeys(map(str, range(20000)), "k" * 100)))


@pytest.mark.parametrize("data", [b"[]", b"", b"\xff\xfe{}", b"null", b"[" * 500_000, b'{"a": '])
def test_what_is_no_message_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        decode(load(data))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_no_number_that_json_has_no_word_for_goes_into_a_frame_or_is_taken_from_one(number):
    frame = encode(Restart(0, 1, 2, number, Cause("exit", 1, "h")))[LENGTH.size :]
    json.loads(frame, parse_constant=pytest.fail)
    written = json.dumps({**to_wire(Restart(0, 1, 2, 0.5, Cause("exit", 1, "h"))), "pause_s": number})
    for text in (written, written.replace("NaN", "1" + "0" * 400).replace("Infinity", "1" + "0" * 400)):
        with pytest.raises(ValueError, match="does not fit"):
            decode(load(text.encode()))


def test_a_frame_over_the_limit_is_named():
    with pytest.raises(ValueError, match=r"frame of 1048577 bytes .* 1048576"):
        list(Frames(MAX_FRAME_BYTES).feed(LENGTH.pack(MAX_FRAME_BYTES + 1)))
