"""Makes frames of the messages between nodes, see `codec`.

Their length has a limit. A longer message is shortened: long texts and long lists of objects lose their middle. A part
of a failure report is better than none.
"""

from __future__ import annotations

from typing import Any

from ..gang.messages import Message, from_wire, to_wire
from .codec import LENGTH, dump

MAX_FRAME_BYTES = 1024 * 1024
# The limits tried in this order on a message that is too long: characters of one text, entries of one list.
_SHORTER = ((8192, 300), (2048, 100), (1024, 40), (256, 10), (128, 2))


def encode(message: Message) -> bytes:
    """Return the frame of `message`, shortened if it has to be; raise ValueError if it is too long even so."""
    wire = to_wire(message)
    data = dump(wire)
    for characters, entries in _SHORTER:
        if len(data) <= MAX_FRAME_BYTES:
            break
        data = dump(_shortened(wire, characters, entries))
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a {wire['type']!r} message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data


def decode(value: Any) -> Message:
    """Return the message that the value of a frame is; raise ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError("a frame must hold a JSON object")
    return from_wire(value)


def _shortened(value: Any, characters: int, entries: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        left_out = f"\n[{len(value) - characters} characters left out]\n"
        return value[: characters // 2] + left_out + value[-(characters // 2) :]
    if isinstance(value, list):
        if len(value) > entries and isinstance(value[0], dict):
            value = [*value[: entries // 2], *value[-(entries // 2) :]]
        return [_shortened(item, characters, entries) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item, characters, entries) for key, item in value.items()}
    return value
