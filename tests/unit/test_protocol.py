"""Every message arrives as it was sent, and what is none is refused by name."""

import json

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchHung
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause, Failure
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import (
    Ended,
    Farewell,
    Go,
    Ready,
    Report,
    Stop,
    Store,
    Verdict,
    from_wire,
    to_wire,
)
from metaflow_extensions.torchrun.plugins.torchrun.gang.policy import LaunchPolicy

CAUSE = Cause("exception", 2, "hőst", 5, 1, 1, "ValueError: größe\n🙂", "Traceback…\n\x00\x1b[0m")
POLICY = LaunchPolicy(5.0, 2, frozenset({"user", "hang"}), 10, hang_timeout_s=30.0)
SAMPLES = [
    Ready(0, 2, "abc", {"torch": "2.13.0"}, 29500, POLICY),
    Report("command", 0, None, {"text": "before_run 1/2 (größe)", "exit_code": None, "seconds": 0.25}),
    Ended(0, False, 1, (Failure(CAUSE, 0.5), Failure(CAUSE)), {0: 0, 1: 0}, stores=True),
    Verdict(0, left={"progress": {"loss": 1.0, "lr": None}}, alone=True),
    Stop(0, 0, "why", 1, 15),
    Go(0, 1, 29500, "gang", 1, 2),
    Farewell("replaced", "another task of this node has started"),
]


def travelled(message):
    return from_wire(json.loads(json.dumps(to_wire(message))))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    assert travelled(message) == message


def test_an_error_arrives_with_class_text_and_cause():
    error = LaunchHung("no rank wrote", CAUSE.as_dict())
    got = travelled(Verdict(3, error)).error
    assert (type(got), str(got), got.cause) == (LaunchHung, str(error), error.cause)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": ["go"]}, "no message of type"),
        ({"type": "stored", "launch": 0}, "stored is .* lacks the fields of Stored, or has others"),
        ({"type": "beat", "colour": "red"}, "beat is .*'colour'.* or has others"),
        ({"type": "join", "node": True}, "join.node is 'True'"),
        ({"type": "leave", "how": "asleep"}, "leave.how is 'asleep', which does not fit"),
        ({"type": "leave", "how": "left", "cause": {"kind": "lost"}}, "leave.cause is .* lacks the fields of Cause"),
        ({"type": "ended", "launch": 0, "ok": True, "exit_codes": {"x": 1}}, "ended.exit_codes"),
    ],
)
def test_what_is_no_message_is_refused_by_name(data, said):
    with pytest.raises(ValueError, match=said):
        from_wire(data)


def test_a_causes_texts_are_cut_on_their_way_and_what_json_has_no_word_for_is_nothing():
    long = Cause("exception", 1, "h", 0, 0, 1, "ValueError: " + "x" * 100_000, "y" * 100_000 + "THE END")
    (arrived,) = travelled(Ended(0, False, failures=(Failure(long),))).failures
    assert arrived.cause == long.bounded() != long
    assert to_wire(Store(0, 0, within_s=float("nan")))["within_s"] is None
