"""An error arrives as it was sent, as every message of `test_random_gang.py` does; what is none is refused by name."""

import pytest

from metaflow_extensions.torchrun.plugins.torchrun.gang.messages import from_wire


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": ["go"]}, "no message of type"),
        ({"type": "stored", "launch": 0}, "stored does not fit: TypeError: .*'generation'"),
        ({"type": "beat", "colour": "red"}, "beat does not fit: KeyError: 'colour'"),
        ({"type": "leave", "how": "left", "cause": {"kind": "lost"}}, "leave does not fit: TypeError: .*'node'"),
        ({"type": "ended", "launch": 0, "ok": True, "exit_codes": {"x": 1}}, "ended does not fit: ValueError"),
    ],
)
def test_what_is_no_message_is_refused_by_name(data, said):
    with pytest.raises(ValueError, match=said):
        from_wire(data)
