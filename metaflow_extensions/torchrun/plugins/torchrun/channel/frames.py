"""Encodes messages as frames: four bytes of length, big endian, and that many bytes of JSON.

The length has a limit. A longer message is shortened: long texts and long lists of objects lose their middle. A part
of a failure report is better than none.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ..gang.protocol import Message, from_wire, to_wire

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1024 * 1024
# The limits tried in this order on a message that is too long: characters of one text, entries of one list.
_SHORTER = ((8192, 300), (2048, 100), (1024, 40), (256, 10), (128, 2))


def encode(message: Message) -> bytes:
    """Return the frame of `message`, shortened if it has to be; raise ValueError if it is too long even so."""
    wire = to_wire(message)
    data = _dump(wire)
    for characters, entries in _SHORTER:
        if len(data) <= MAX_FRAME_BYTES:
            break
        data = _dump(_shortened(wire, characters, entries))
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a {wire['type']!r} message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Message:
    """Return the message of a frame without its length; raise ValueError if it is none."""
    try:
        wire = json.loads(data)
    except RecursionError:
        raise ValueError("a frame must not be nested so deeply") from None
    if not isinstance(wire, dict):
        raise ValueError("a frame must hold a JSON object")
    return from_wire(wire)


def length_of(head: bytes) -> int:
    """Return how many bytes follow the first four of a frame; raise ValueError if they are too many."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


def _dump(wire: Any) -> bytes:
    # As they are, characters take four bytes at most; escaped, an emoji takes twelve. Half of a surrogate pair, as
    # file names can hold it, is no UTF-8; `json.loads` takes it back as it was.
    return json.dumps(wire, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


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
