"""Frames between a task and its supervisor: JSON in packets, without any I/O.

The link keeps packets whole; a frame is one of them, or several. A packet has the number of its frame, since a signal
handler may send a frame between two packets of another one.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_HEAD = struct.Struct(">I?")  # the number of the frame, and whether this is its last packet
MOST_BYTES = 64 * 1024
"""A packet has no more bytes; the smallest buffer of a socket on Linux that anybody uses holds it."""


def dump(value: Any) -> bytes:
    """Return plain data as JSON."""
    # As they are, characters take four bytes at most; escaped, an emoji takes twelve. Half of a surrogate pair, as
    # file names can hold it, is no UTF-8; `json.loads` takes it back as it was.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def packets(number: int, value: Any) -> list[bytes]:
    """Return the packets of plain data, each with the `number` of its frame."""
    data, size = dump(value), MOST_BYTES - _HEAD.size
    return [_HEAD.pack(number, at + size >= len(data)) + data[at : at + size] for at in range(0, len(data), size)]


class Packets:
    """Packets that have come, as frames."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def add(self, packet: bytes) -> Any:
        """Return the value of the frame that a packet completes; None if it completes none."""
        number, is_last = _HEAD.unpack_from(packet)
        parts = self._parts.setdefault(number, [])
        parts.append(packet[_HEAD.size :])
        return json.loads(b"".join(self._parts.pop(number))) if is_last else None
