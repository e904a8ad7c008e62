"""An error arrives as it was sent, as every message of `test_random_gang.py` does; what is none is refused by name."""

import json

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.errors import LaunchHung
from metaflow_extensions.torchrun.plugins.torchrun.gang.cause import Cause
from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import Verdict, from_wire, to_wire

CAUSE = Cause("exception", 2, "hőst", 5, 1, 1, "ValueError: größe\n🙂", "Traceback…\n\x00\x1b[0m")


def travelled(message):
    return from_wire(json.loads(json.dumps(to_wire(message))))


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
